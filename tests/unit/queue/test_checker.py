"""The checker of histories: a sound one passes, and every rule is noticed when it does not hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from forage_command import RunForage, run_forage
from history_files import Event, Story, tell_story

from forage_queue.checker.check import Report, check
from forage_runtime.errors import DataError

__all__ = ["run_forage"]


@pytest.fixture
def judge(tmp_path: Path) -> Callable[[Story], Report]:
    """Write a story and check it."""
    folders = iter(range(10**6))
    return lambda story: check(story.write(tmp_path / str(next(folders))))


def change(kind: str, **found: object) -> Callable[..., Callable[[Story], None]]:
    """Change fields, or the result, of the first operation with the fields `found`."""

    def with_values(result: str | None = "ok", **fields: object) -> Callable[[Story], None]:
        def apply(story: Story) -> None:
            event = story.events[story.find(kind, **found)]
            event.fields |= fields
            event.result = result

        return apply

    return with_values


def move(kind: str, steps: int, **found: object) -> Callable[[Story], None]:
    """Let an operation happen earlier or later."""

    def apply(story: Story) -> None:
        place = story.find(kind, **found)
        story.events.insert(place + steps, story.events.pop(place))

    return apply


def repeat(kind: str, result: str = "ok", **found: object) -> Callable[[Story], None]:
    """Let an operation happen a second time."""

    def apply(story: Story) -> None:
        event = story.events[story.find(kind, **found)]
        story.events.append(Event(event.process, kind, result, dict(event.fields)))

    return apply


def drop(kind: str, **found: object) -> Callable[[Story], None]:
    return lambda story: story.events.pop(story.find(kind, **found)) and None


def discard_before_its_step(story: Story) -> None:
    event = Event("trainer2", "discard", "ok", {"epoch": 2, "stream": "trajectories", "entries": ["g20"]})
    story.events.insert(story.find("acknowledge", step=2), event)


def take_an_answer_that_nobody_gave(story: Story) -> None:
    group = {"entry": "v1", "batch": 3, "position": 0, "attempt": 0, "uid": "q/test/0/0"}
    story.add("trainer2", "claim_groups", epoch=2, stream="validation-after", entries=[group])


def discard_what_nobody_took(story: Story) -> None:
    story.add("trainer2", "discard", epoch=2, stream="trajectories", entries=["g99"])


U = "q/train/{}/0".format
G2 = {"uids": [U(4), U(5)], "entries": ["g20", "g21"]}


def test_a_sound_history_holds(judge: Callable[[Story], Report]) -> None:
    report = judge(tell_story())
    assert report.violations == ()
    assert report.is_complete
    counts = report.to_json()
    assert (counts["processes"], counts["unknown"], counts["refused"], counts["steps"]) == (4, 1, 3, 3)
    assert counts["operations"] == len(tell_story().events)


@pytest.mark.parametrize(
    ("breach", "rule", "sentence", "shown"),
    [
        (
            change("acknowledge", step=2)(uids=[U(4)], entries=["g20"]),
            "lost",
            "position 1 of batch 2 was never acknowledged",
            ["issue", "acknowledge"],
        ),
        (drop("acknowledge", step=2), "lost", "step 2 was never acknowledged, and step 3 was", ["acknowledge"]),
        (
            change("acknowledge", step=3)(uids=[U(6), U(5)], entries=["g30", "g21"]),
            "twice",
            "group q/train/5/0 counts for steps 2 and 3",
            ["acknowledge", "acknowledge"],
        ),
        (
            change("acknowledge", step=1, epoch=2)(uids=[U(2), U(2)]),
            "twice",
            "step 1 was acknowledged with two sets of groups",
            ["acknowledge", "acknowledge"],
        ),
        (
            change("acknowledge", step=3)(uids=[U(6), U(6)], entries=["g30", "g30"]),
            "twice",
            "step 3 counts group q/train/6/0 2 times",
            ["acknowledge"],
        ),
        (
            change("issue", batch=2, position=0, epoch=2)(),
            "twice",
            "attempt 0 of position 0 of batch 2 was issued twice",
            ["issue", "issue"],
        ),
        (repeat("finish", entry="p10"), "twice", "the prompt of entry p10 was finished twice", ["finish", "finish"]),
        (
            repeat("claim_groups", epoch=2),
            "twice",
            "entry g30 was delivered as new twice",
            ["claim_groups", "claim_groups"],
        ),
        (
            move("issue", 2, batch=3, position=0),
            "epoch",
            "issue succeeded under epoch 1 after epoch 2 was acquired",
            ["acquire_epoch", "issue"],
        ),
        (
            change("acquire_epoch", epoch=2)(epoch=1),
            "epoch",
            "epoch 1 was acquired after epoch 1",
            ["acquire_epoch", "acquire_epoch"],
        ),
        (
            change("issue", batch=3, position=1, epoch=2)(epoch=3),
            "epoch",
            "epoch 3 was used by a process that had not acquired it",
            ["acquire_epoch", "issue"],
        ),
        (
            drop("claim_prompts"),
            "unfounded",
            "group q/train/2/0 was finished, and its prompt not claimed before",
            ["finish"],
        ),
        (
            drop("issue", batch=3, position=0),
            "unfounded",
            "the prompt of group q/train/6/0 was claimed, and not issued before",
            ["claim_prompts", "finish"],
        ),
        (
            change("acknowledge", step=3)(uids=[U(6), U(99)]),
            "unfounded",
            "step 3 counts group q/train/99/0, which was not issued for it",
            ["acknowledge"],
        ),
        (
            change("acknowledge", step=3)(entries=["g30"]),
            "unfounded",
            "step 3 counts 2 groups, and 1 left the stream",
            ["acknowledge"],
        ),
        (
            drop("claim_groups", epoch=2),
            "unfounded",
            "step 3 counts group q/train/6/0, which no trainer took",
            ["acknowledge"],
        ),
        (
            change("finish", entry="p30")("refused"),
            "unfounded",
            "step 3 counts group q/train/6/0, which no worker had finished",
            ["claim_groups", "acknowledge"],
        ),
        (
            move("finish", 4, entry="p31"),
            "unfounded",
            "step 3 counts group q/train/7/0, which no worker had finished",
            ["claim_groups", "finish", "acknowledge"],
        ),
        (discard_what_nobody_took, "unfounded", "entry g99 was discarded, and not taken before", ["discard"]),
        (
            take_an_answer_that_nobody_gave,
            "unfounded",
            "answer q/test/0/0 was taken, and not finished before",
            ["claim_groups"],
        ),
        (
            move("publish", 2, version=2),
            "unannounced",
            "version 2 of epoch 2 was loaded and not announced before",
            ["load", "publish"],
        ),
        (
            change("publish", version=2)("refused"),
            "unannounced",
            "group q/train/6/0 has tokens of version 2 of epoch 2, which was not announced before",
            ["finish"],
        ),
        (
            drop("load", version=2),
            "unannounced",
            "group q/train/6/0 has tokens of version 2 of epoch 2, which no engine had loaded",
            ["finish"],
        ),
        (
            change("publish", version=1, epoch=2)(version=0, epoch=1),
            "altered",
            "version 0 of epoch 1 was announced with two contents",
            ["publish", "publish"],
        ),
        (
            change("load", version=2)(digests=["another"]),
            "altered",
            "an engine has other files of version 2 than were announced",
            ["load", "publish"],
        ),
        (
            change("serve", version=2)(digests=["another"]),
            "altered",
            "an engine has other files of version 2 than were announced",
            ["serve", "publish"],
        ),
        (
            change("load", version=3)("PolicyError: altered"),
            "altered",
            "an engine says that it serves version 3, which it has not loaded last",
            ["serve", "load"],
        ),
        (
            move("serve", -1, version=3),
            "altered",
            "an engine says that it serves version 3, which it has not loaded last",
            ["serve", "load"],
        ),
        (
            discard_before_its_step,
            "deleted",
            "a group of step 2 left the stream before the step was acknowledged",
            ["discard", "acknowledge"],
        ),
        (
            change("finish", entry="p30")(versions=[[[2, 2]], [[0, 1], [2, 2]]]),
            "stale",
            "step 3 counts tokens of version 0, and 1 is the oldest allowed",
            ["finish", "acknowledge"],
        ),
    ],
)
def test_a_breach_is_found_and_shown_with_the_fewest_operations(
    judge: Callable[[Story], Report],
    breach: Callable[[Story], None],
    rule: str,
    sentence: str,
    shown: list[str],
) -> None:
    story = tell_story()
    breach(story)
    found = {violation.sentence: violation for violation in judge(story).violations}
    assert sentence in found, list(found)
    assert found[sentence].rule == rule
    assert [operation.kind for operation in found[sentence].operations] == shown


def test_an_unknown_or_failed_operation_counts_either_way(judge: Callable[[Story], Report]) -> None:
    for result in (None, "unknown", "UnavailableError: no answer"):
        for kind, found in (
            ("issue", {"batch": 1}),
            ("finish", {"entry": "p10"}),
            ("publish", {"version": 2}),
            ("load", {"version": 2}),
        ):
            story = tell_story()
            change(kind, **found)(result)(story)
            assert judge(story).violations == (), "it happened"
            repeat(kind, "ok", **found)(story)
            story.events.insert(story.find(kind, **found) + 1, story.events.pop())
            assert judge(story).violations == (), "it did not, and was done again"


def test_acknowledgements_that_are_repeated_count_once_and_unfinished_runs_are_outstanding(
    judge: Callable[[Story], Report],
) -> None:
    story = tell_story()
    repeat("acknowledge", step=3)(story)
    assert judge(story).is_complete
    story = tell_story()
    del story.events[story.find("acknowledge", step=3)]
    report = judge(story)
    assert report.violations == ()
    assert (report.steps, report.is_complete, report.outstanding) == (2, False, {3: [0, 1]})
    story.events[story.find("acknowledge", step=2)].result = "UnavailableError: no answer"
    assert judge(story).outstanding == {2: [0, 1], 3: [0, 1]}


def test_a_prompt_may_be_withdrawn_by_a_trainer_that_never_claims_any(judge: Callable[[Story], Report]) -> None:
    story = tell_story()
    story.add("trainer2", "discard", epoch=2, stream="prompts", entries=["p99"])
    assert judge(story).violations == ()


def test_a_forged_answer_that_is_rejected_is_no_breach(judge: Callable[[Story], Report]) -> None:
    story = tell_story()
    take_an_answer_that_nobody_gave(story)
    story.add("trainer2", "reject", epoch=2, stream="validation-after", entries=["v1"])
    assert judge(story).violations == ()


def test_stragglers_are_accounted_for(judge: Callable[[Story], Report]) -> None:
    story = tell_story()
    change("acknowledge", step=3)(uids=[U(6)], entries=["g30"], dropped=[U(7)])(story)
    assert judge(story).violations == ()


def test_data_that_a_test_took_from_the_server_excuses_what_is_done_again(judge: Callable[[Story], Report]) -> None:
    story = tell_story()
    story.add("test", "lose_data")
    repeat("issue", batch=1, epoch=1)(story)
    story.events[-1].process, story.events[-1].fields["epoch"] = "trainer2", 2
    assert judge(story).violations == ()
    story.events.append(story.events.pop(story.find("lose_data")))
    assert [violation.rule for violation in judge(story).violations] == ["twice"]


def test_a_group_whose_file_was_lost_after_it_was_read_may_leave_the_stream(judge: Callable[[Story], Report]) -> None:
    """A trainer that is being replaced has trained on it; its successor finds no file, and a third acknowledges."""
    story = tell_story()
    discard_before_its_step(story)
    removal = story.find("discard", entries=["g20"])
    story.events.insert(removal, Event("test", "lose_data", "ok", {}))
    assert [violation.rule for violation in judge(story).violations] == ["deleted"], "no process discards for that"
    story.events[removal + 1].kind = "reject"
    assert judge(story).violations == ()
    story.events.insert(0, story.events.pop(removal))
    assert [violation.rule for violation in judge(story).violations] == ["deleted"], "it was lost before it was taken"


def test_what_steps_of_ready_batches_count(judge: Callable[[Story], Report]) -> None:
    """A step without an answer has counted its groups once a later one has; data that was lost is counted anew."""
    story = tell_story()
    story.batching = "ready"
    assert judge(story).is_complete
    story.events[story.find("acknowledge", step=2)].result = None
    report = judge(story)
    assert (report.violations, report.outstanding) == ((), {})
    story.events[story.find("acknowledge", step=3)].result = None
    report = judge(story)
    assert (report.violations, report.outstanding) == ((), {2: [0, 1], 3: [0, 1]})

    story = tell_story()
    story.batching = "ready"
    story.add("test", "lose_data")
    ways = {2: ([U(4), U(6)], ["g20", "g30"]), 3: ([U(5), U(7)], ["g21", "g31"])}
    for step, (uids, entries) in ways.items():
        ends = [2, 3] if step == 3 else []
        story.add("trainer2", "acknowledge", epoch=2, step=step, uids=uids, dropped=[], entries=entries, ends=ends)
    assert judge(story).violations == ()
    story.events.append(story.events.pop(story.find("lose_data")))
    sentences = [violation.sentence for violation in judge(story).violations]
    assert f"group {U(6)} counts for steps 3 and 2" in sentences
    assert "position 0 of batch 3 was settled by steps 3 and 2" in sentences


def describe(event: Event) -> str:
    return f"{event.kind} {event.fields}"


def is_harmless_to_drop(story: Story, event: Event) -> bool:
    """What nobody needs: an operation without effect, a repetition, what an engine says."""
    if event.result != "ok":
        return True
    if event.kind == "acknowledge":
        return event.fields["step"] != 2  # the first is there twice; without the last the run is not complete
    if event.kind == "issue":
        return event.fields["batch"] == 3 and event.fields["position"] == 1  # the one in flight may have happened
    if event.kind == "claim_groups":
        return event.fields["entries"][0]["batch"] == 2  # taken again by the next trainer
    return event.kind in ("reclaim_groups", "serve")  # the trainer before had taken them


def test_no_operation_can_be_dropped_unnoticed(judge: Callable[[Story], Report]) -> None:
    sound = tell_story()
    for place, event in enumerate(sound.events):
        story = sound.copy()
        del story.events[place]
        report = judge(story)
        is_found = bool(report.violations) or not report.is_complete
        expected = not is_harmless_to_drop(sound, event) or event is sound.events[-1]
        assert is_found == expected, describe(event)


def test_no_operation_can_be_doubled_unnoticed(judge: Callable[[Story], Report]) -> None:
    idempotent = {"publish", "load", "serve", "acknowledge", "reclaim_groups"}
    sound = tell_story()
    for place, event in enumerate(sound.events):
        story = sound.copy()
        story.events.insert(place, story.copy().events[place])
        if event.result == "ok":
            assert bool(judge(story).violations) == (event.kind not in idempotent), describe(event)


def test_no_epoch_can_be_changed_unnoticed(judge: Callable[[Story], Report]) -> None:
    sound = tell_story()
    for place, event in enumerate(sound.events):
        for epoch in (event.fields["epoch"] - 1, event.fields["epoch"] + 1):
            story = sound.copy()
            story.events[place].fields["epoch"] = epoch
            if event.result == "ok" and event.process != "worker":
                assert judge(story).violations, describe(event)


def test_no_operation_can_be_moved_to_the_beginning_or_the_end_unnoticed(judge: Callable[[Story], Report]) -> None:
    sound = tell_story()
    for place, event in enumerate(sound.events):
        for target in (0, len(sound.events) - 1):
            story = sound.copy()
            story.events.insert(target, story.events.pop(place))
            if not is_harmless_to_drop(sound, event) and target != place:
                is_last_of_its_kind = event.kind in ("acknowledge", "publish") and event.process == "trainer2"
                assert judge(story).violations or (target and is_last_of_its_kind), describe(event)


def edit_lines(folder: Path, edit: Callable[[list[str]], object]) -> None:
    file = folder / "history" / "trainer2.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    edit(lines)
    file.write_text("".join(lines))


@pytest.mark.parametrize(
    ("edit", "gap"),
    [
        (lambda lines: lines.__delitem__(slice(11, 13)), "operation 6 is missing"),
        (lambda lines: lines.insert(12, lines[11]), "or 6 is there twice"),
        (lambda lines: lines.__delitem__(11), "operation 6 is missing"),
        (lambda lines: lines.insert(13, lines[12]), "ends without having begun, or twice"),
        (lambda lines: lines.append(lines.pop(12)), "written before the line above it"),
    ],
)
def test_lines_that_are_missing_doubled_or_moved_are_noticed(
    tmp_path: Path, edit: Callable[[list[str]], object], gap: str
) -> None:
    folder = tell_story().write(tmp_path / "run")
    edit_lines(folder, edit)
    found = [violation for violation in check(folder).violations if violation.rule == "gap"]
    assert any(gap in violation.sentence for violation in found), found


def test_an_incomplete_last_line_is_an_operation_in_flight_and_a_damaged_line_is_refused(tmp_path: Path) -> None:
    folder = tell_story().write(tmp_path / "run")
    edit_lines(folder, lambda lines: lines.append(lines.pop()[:20]))
    report = check(folder)
    assert (report.violations, report.is_complete, report.to_json()["unknown"]) == ((), False, 2)
    edit_lines(folder, lambda lines: lines.insert(3, "[]\n"))
    with pytest.raises(DataError, match=re.escape("trainer2.jsonl is damaged in line 4")):
        check(folder)


def test_times_of_two_machines_are_ordered_by_the_time_of_day_up_to_a_second(tmp_path: Path) -> None:
    story = tell_story()
    move("publish", 1, version=2)(story)  # half a second after its load begins
    folder = story.write(tmp_path / "run")
    assert [violation.rule for violation in check(folder).violations] == ["unannounced"]
    file = folder / "history" / "engine.jsonl"
    text = file.read_text().replace('"boot": "b", "clock": 0.0', '"boot": "other", "clock": 0.0', 1)
    file.write_text(text)
    assert check(folder).violations == ()
    file.write_text(text.replace('"unix": 1000000000.0', '"unix": 999999990.0'))
    assert {violation.rule for violation in check(folder).violations} == {"unannounced"}


def test_the_command_prints_a_table_the_operations_of_a_violation_and_one_json_object(
    run_forage: RunForage, tmp_path: Path
) -> None:
    sound = tell_story().write(tmp_path / "sound")
    ended = run_forage("check-history", str(sound), "--complete")
    assert ended.code == 0, ended.stderr
    assert re.search(r"^ issue +10 +6 +3 +0 +1 *$", ended.stdout, re.MULTILINE), ended.stdout
    assert json.loads(ended.stdout.splitlines()[-1])["complete"] is True

    story = tell_story()
    repeat("finish", entry="p10")(story)
    ended = run_forage("check-history", str(story.write(tmp_path / "broken")))
    assert ended.code == 1
    assert "violated (twice): the prompt of entry p10 was finished twice" in ended.stdout
    assert len(re.findall(r"^    \[\S+, \S+\] worker #\d+ finish .*entry=p10.* → ok$", ended.stdout, re.MULTILINE)) == 2
    assert json.loads(ended.stdout.splitlines()[-1])["rules"] == {"twice": 1}

    story = tell_story()
    drop("acknowledge", step=3)(story)
    folder = story.write(tmp_path / "going")
    ended = run_forage("check-history", str(folder))
    assert ended.code == 0, ended.stdout
    assert "so far: 2 of 3 steps acknowledged\noutstanding: batch 3, positions 0, 1\n" in ended.stdout
    assert run_forage("check-history", str(folder), "--complete").code == 1


def test_a_run_without_a_history_is_an_error_that_names_the_setting(run_forage: RunForage, tmp_path: Path) -> None:
    ended = run_forage("check-history", str(tmp_path))
    assert ended.code == 2
    assert "no recorded history: start the run with run.record_history=true" in ended.stderr
    assert ended.stderr.count("\n") == 1
