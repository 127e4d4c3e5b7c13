"""The list of runs and the page of one: from sound, half-written and broken folders."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from console_client import ConsoleClient
from run_folders import write_lines, write_run
from upath import UPath

from forage_runtime.settings import load_settings

NOW = time.time()


@pytest.fixture(autouse=True)
def stop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console looks at a run when its files say, however long the tests take."""
    monkeypatch.setattr(time, "time", lambda: NOW)


def build_answer(number: int, em: float | None, **values: Any) -> dict[str, Any]:
    span = {"role": "model", "text": f"<answer>{number}</answer>"}
    uid = f"nq/test/{number}/0"
    found = {"uid": uid, "question": f"question {number}", "targets": ["x"], "em": em, "reward": em, "spans": [span]}
    return found | {"answer": str(number), "failed": em is None} | values


def build_step(step: int, **values: Any) -> dict[str, Any]:
    seconds = {"wait": 1.0, "update": 1.0, "total": 2.0}
    means = {"em_mean": step / 10, "reward_mean": 0.5, "trajectories": 8, "failed": 0}
    return {"step": step, "total_steps": 10, "time": NOW - 60 + 2 * step, "seconds": seconds} | means | values


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the run `one`, which goes on, and a link to it."""
    folder = tmp_path / "runs"
    (folder / "one").mkdir(parents=True)
    answers = {"before": [build_answer(n, float(n == 0)) for n in range(4)]}
    write_run(folder / "one", answers, [build_step(step) for step in range(1, 6)])
    summary = {"label": "before", "version": 0, "em": 0.25, "count": 4, "failed": 0, "seconds": 4.0}
    (folder / "one/validation/before.json").write_text(json.dumps(summary))
    (folder / "one/state.json").write_text(
        json.dumps({"phase": "training", "detail": "step 6", "done": 5, "total": 10})
    )
    (folder / "latest").symlink_to("one")
    return folder


@pytest.fixture
def client(runs: Path) -> ConsoleClient:
    return ConsoleClient(runs)


def age(folder: Path, seconds: float) -> None:
    """Let every file of a run be older."""
    for file in [folder, *folder.rglob("*")]:
        os.utime(file, (NOW - seconds, NOW - seconds))


def change_settings(run: Path, **values: Any) -> None:
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    for name, value in values.items():
        section, _, field = name.rpartition("__")
        place = settings
        for part in section.split("__"):
            place = place[part]
        place[field] = value
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))


def test_a_row_says_how_far_a_run_is(client: ConsoleClient, runs: Path) -> None:
    found = client.read("/runs")
    assert found["folder"] == str(runs)
    (row,) = found["runs"]
    assert (row["id"], row["state"], row["problem"], row["is_latest"]) == ("one", "running", None, True)
    assert (row["model"], row["algorithm"], row["step"], row["total_steps"]) == ("tiny-policy", "grpo", 5, 10)
    assert row["sparkline"] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert row["em"] == row["best_em"]
    assert (row["em"]["mean"], row["em"]["count"], row["best_label"]) == (0.25, 4, "before")
    assert row["progress"] == {"phase": "training", "detail": "step 6", "done": 5, "total": 10, "left_s": 50.0}
    assert row["started"] == pytest.approx(NOW - 60 - 4), "before the validation that came before the first step"
    assert row["notes"] == {"note": "", "tags": []}


def test_the_interval_of_a_row_is_that_of_the_answers(client: ConsoleClient) -> None:
    row, detail = client.read("/runs")["runs"][0], client.read("/runs/one")
    assert row["em"] == detail["validations"][0]["em"] == detail["validations"][0]["em_by_source"]["nq"]
    assert row["em"]["low"] < 0.25 < row["em"]["high"]


@pytest.mark.parametrize(
    ("phase", "seconds", "state"),
    [
        *(("training", 0, "running"), ("training", 3600, "stopped"), ("done", 3600, "done"), ("done", 0, "done")),
        *(("validating", 3600, "stopped"), ("starting", 0, "running")),
    ],
)
def test_the_state_follows_from_phase_and_age(
    client: ConsoleClient, runs: Path, phase: str, seconds: float, state: str
) -> None:
    (runs / "one/state.json").write_text(json.dumps({"phase": phase}))
    age(runs / "one", seconds)
    assert client.read("/runs")["runs"][0]["state"] == state


def test_a_run_with_long_steps_goes_on_for_longer(client: ConsoleClient, runs: Path) -> None:
    steps = [build_step(step, time=NOW - 6000 + 1000 * step) for step in range(1, 6)]
    (runs / "one/metrics.jsonl").write_text(write_lines(steps))
    age(runs / "one", 1500)
    assert client.read("/runs")["runs"][0]["state"] == "running"


def test_a_run_without_steps_is_starting(client: ConsoleClient, runs: Path) -> None:
    (runs / "one/metrics.jsonl").unlink()
    (runs / "one/state.json").unlink()
    shutil.rmtree(runs / "one/validation")
    (row,) = client.read("/runs")["runs"]
    assert (row["state"], row["step"], row["em"], row["problem"]) == ("starting", 0, None, None)
    assert client.read("/runs/one")["validations"] == []


@pytest.mark.parametrize("activity", ["serving", "evaluating"])
def test_services_that_train_nothing_run_while_their_supervisor_lives(
    client: ConsoleClient, runs: Path, activity: str
) -> None:
    (runs / "one/metrics.jsonl").unlink()
    (runs / "one/state.json").write_text(json.dumps({"phase": activity}))
    (runs / "one/processes.json").write_text(json.dumps({"supervisor": {"pid": os.getpid()}}))
    age(runs / "one", 3600)
    (row,) = client.read("/runs")["runs"]
    assert (row["state"], row["algorithm"], row["total_steps"]) == ("running", activity, None)
    (runs / "one/processes.json").unlink()
    (row,) = client.read("/runs")["runs"]
    assert (row["state"], row["algorithm"]) == ("stopped", activity)


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "settings of text": (lambda run: (run / "settings.yaml").write_text("a: [1"), "it is not valid YAML (line 2)"),
    "settings of a list": (lambda run: (run / "settings.yaml").write_text("- 1"), "it holds no settings"),
    "settings of a wrong type": (lambda run: (run / "settings.yaml").write_text("a: !!bool x"), "is not valid YAML"),
    "settings without a number": (lambda run: (run / "settings.yaml").write_text("a: !!int ''"), "is not valid YAML"),
    "settings without a time": (lambda run: (run / "settings.yaml").write_text("a: !!timestamp x"), "not valid YAML"),
    "binary settings": (lambda run: (run / "settings.yaml").write_bytes(b"\xff\x00\x01"), "it is not valid YAML"),
    "huge settings": (lambda run: (run / "settings.yaml").write_text("a: " + "b" * 2**21), "larger than 1 MiB"),
    "settings that grow": (
        lambda run: (run / "settings.yaml").write_text(
            "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{n}: &{n} [{','.join([f'*{p}'] * 10)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True))
        ),
        "it is not valid YAML",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_run_is_a_row_with_its_problem(client: ConsoleClient, runs: Path, name: str) -> None:
    shutil.copytree(runs / "one", runs / "sound")
    BREAKS[name][0](runs / "one")
    rows = {row["id"]: row for row in client.read("/runs")["runs"]}
    assert BREAKS[name][1] in rows["one"]["problem"]
    assert rows["one"]["state"] == "broken"
    assert (rows["sound"]["state"], rows["sound"]["problem"]) == ("running", None)
    detail = client.read("/runs/one")
    assert detail["warnings"][0] == {"severity": "error", "text": rows["one"]["problem"], "step": None}
    assert client.read("/runs/one/curves")["steps"] == [1, 2, 3, 4, 5], "what can be read is shown"


def test_a_run_of_a_trainer_that_was_started_by_itself_has_no_settings(client: ConsoleClient, runs: Path) -> None:
    (runs / "one/settings.yaml").unlink()
    [row] = client.read("/runs")["runs"]
    assert (row["id"], row["state"], row["problem"], row["model"]) == ("one", "running", None, None)
    detail = client.read("/runs/one")
    assert not any(warning["severity"] == "error" for warning in detail["warnings"])
    assert client.read("/runs/one/curves")["steps"] == [1, 2, 3, 4, 5]


FLAWS: dict[str, tuple[Callable[[Path], object], str]] = {
    "metrics that are a folder": (
        lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
        "metrics.jsonl cannot be read",
    ),
    "half a line": (
        lambda run: (run / "metrics.jsonl").write_text(write_lines([build_step(1)]) + '{"step": 2'),
        "",
    ),
    "a state of text": (lambda run: (run / "state.json").write_text("{"), "state.json holds no JSON object"),
    "a state of rubbish": (
        lambda run: (run / "state.json").write_text('{"phase": [1], "done": "x", "total": 1e400}'),
        "",
    ),
    "half a summary": (
        lambda run: (run / "validation/before.json").write_text('{"em": 0.'),
        "before.json holds no JSON",
    ),
    "answers without summary": (lambda run: (run / "validation/before.json").unlink(), ""),
    "half the answers": (
        lambda run: (run / "validation/before.jsonl").write_text((run / "validation/before.jsonl").read_text()[:-100]),
        "before.jsonl is damaged at line 4",
    ),
    "no answers": (lambda run: (run / "validation/before.jsonl").unlink(), "before.jsonl is missing"),
    "answers of rubbish": (
        lambda run: (run / "validation/before.jsonl").write_text(
            '{"uid": 5, "em": "x", "targets": 7, "question": null}\n{"uid": "a", "em": NaN, "spans": 5, "answer": {}}\n'
        ),
        "",
    ),
    "a note of another": (lambda run: (run / "notes.json").write_text('{"mine": 1}'), "notes.json holds no note"),
    "events of rubbish": (lambda run: (run / "events.jsonl").write_text('{"kind": 1}\n[]\n{\n{"kind": "x"}\n'), ""),
    "rollbacks in brackets": (lambda run: (run / "rollbacks.json").write_text("[" * 100_000), ""),
    "rollbacks of rubbish": (lambda run: (run / "rollbacks.json").write_text("[1, {}]"), ""),
    "a summary of rubbish": (lambda run: (run / "summary.json").write_text('{"a": NaN, "restarts_x": "y"}'), ""),
    "a validation that is a folder": (
        lambda run: ((run / "validation/before.jsonl").unlink(), (run / "validation/before.jsonl").mkdir()),
        "before.jsonl cannot be read (Is a directory)",
    ),
}


@pytest.mark.parametrize("name", FLAWS)
def test_a_part_that_cannot_be_read_is_a_sentence(client: ConsoleClient, runs: Path, name: str) -> None:
    FLAWS[name][0](runs / "one")
    assert client.read("/runs")["runs"][0]["id"] == "one"
    problems = [warning["text"] for warning in client.read("/runs/one")["warnings"] if warning["severity"] == "error"]
    assert [FLAWS[name][1] in problem for problem in problems] == [True] * bool(FLAWS[name][1])
    for path in ("/runs/one/curves", "/runs/one/questions", "/compare"):
        client.read(path, a="one", b="one")


def test_what_is_no_run_is_not_listed(client: ConsoleClient, runs: Path) -> None:
    (runs / "cache").mkdir()
    (runs / "mlflow.db").write_text("x")
    (runs / ".hidden").mkdir()
    (runs / ".hidden/settings.yaml").write_text("{}")
    assert [row["id"] for row in client.read("/runs")["runs"]] == ["one"]


def test_a_folder_without_runs_is_an_empty_list(tmp_path: Path) -> None:
    assert ConsoleClient(tmp_path).read("/runs")["runs"] == []
    assert ConsoleClient(tmp_path / "nothing").read("/runs")["runs"] == []


def test_a_run_that_is_deleted_is_gone(client: ConsoleClient, runs: Path) -> None:
    client.read("/runs/one")
    shutil.rmtree(runs / "one")
    assert client.read("/runs")["runs"] == []
    for path in ("/runs/one", "/runs/one/curves", "/runs/one/questions", "/runs/latest"):
        assert "there is no run" in client.read_problem(path, 404)
    shutil.copytree(runs, runs / "one", symlinks=True)
    assert client.read_problem("/runs/two", 404)


def test_runs_are_in_order_of_their_start(client: ConsoleClient, runs: Path) -> None:
    for name, start in (("older", -5000), ("newer", 5000)):
        shutil.copytree(runs / "one", runs / name)
        steps = [build_step(step, time=NOW + start + step) for step in range(1, 3)]
        (runs / name / "metrics.jsonl").write_text(write_lines(steps))
        os.utime(runs / name / "settings.yaml", (NOW + 9000, NOW + 9000))
    assert [row["id"] for row in client.read("/runs")["runs"]] == ["newer", "one", "older"]


def test_a_list_reads_only_what_has_changed(client: ConsoleClient, runs: Path) -> None:
    file = runs / "one/metrics.jsonl"
    client.read("/runs")
    state = file.stat()
    with file.open("r+b") as stream:
        stream.write(file.read_bytes().replace(b'"em_mean": 0.1', b'"em_mean": 0.9'))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert client.read("/runs")["runs"][0]["sparkline"][0] == 0.1
    os.utime(file)
    assert client.read("/runs")["runs"][0]["sparkline"][0] == 0.9


def test_passwords_are_not_shown(client: ConsoleClient, runs: Path) -> None:
    change_settings(runs / "one", redis__url="rediss://user:hunter2@host:1/0")
    reply = client.ask("/runs/one")
    assert "hunter2" not in reply.text
    assert reply.json()["settings"]["redis"]["url"] == "rediss://***@host:1/0"
    assert reply.json()["changed"] == ["redis.url"]


def test_settings_of_another_version_are_shown_as_they_are(client: ConsoleClient, runs: Path) -> None:
    (runs / "one/settings.yaml").write_text(
        "future: {knob: .nan, date: 2026-01-01}\nmodel: {path: [1]}\nrun: {id: other}\n"
    )
    detail = client.read("/runs/one")
    assert detail["changed"] == ["future.knob", "future.date", "model.path"]
    assert detail["settings"]["future"] == {"knob": None, "date": "2026-01-01"}
    assert (detail["run"]["model"], detail["run"]["algorithm"]) == (None, None)


def test_defaults_are_not_changed_settings(client: ConsoleClient, runs: Path) -> None:
    (runs / "one/settings.yaml").write_text(load_settings(None, ["run.id=one", "rollout.n=4"]).to_yaml())
    assert client.read("/runs/one")["changed"] == ["rollout.n"]


def test_marks_say_what_happened(client: ConsoleClient, runs: Path) -> None:
    run = runs / "one"
    for step in (2, 4):
        (run / f"checkpoints/step_{step}").mkdir(parents=True)
    (run / "checkpoints/step_4/manifest.json").write_text("{}")
    (run / "checkpoints/best").write_text("step_4\n")
    (run / "rollbacks.json").write_text(json.dumps([{"step": 3, "guard": "kl", "reason": "too high", "time": 5.0}]))
    (run / "metrics.jsonl").write_text(write_lines([build_step(1), build_step(2, guards=["entropy"])]))
    marks = [(mark["step"], mark["kind"], mark["text"]) for mark in client.read("/runs/one")["marks"]]
    assert marks == [
        (0, "validation", "validation 'before': greedy EM 0.250"),
        (2, "guard", "guard 'entropy'"),
        (3, "rollback", "rolled back: guard 'kl': too high"),
        (4, "best checkpoint", "best checkpoint: step_4"),
        (4, "checkpoint", "checkpoint step_4"),
    ]


def test_events_are_marks_and_count_restarts(client: ConsoleClient, runs: Path) -> None:
    events = [
        {"time": 5.0, "kind": "start", "text": "a new run", "step": 0, "service": "trainer"},
        {
            "time": NOW - 55.5,
            "kind": "restart",
            "text": "died after 3 s (exit code 1)",
            "step": None,
            "service": "rollout",
        },
        {"time": NOW, "kind": "validation", "text": "before: EM 0.250", "step": 0, "service": "trainer"},
        {"time": NOW, "kind": "guard", "text": "kl (warn): too high", "step": math.inf},
    ]
    (runs / "one/events.jsonl").write_text(write_lines(events))
    detail = client.read("/runs/one")
    marks = [(mark["step"], mark["kind"], mark["text"]) for mark in detail["marks"]]
    assert marks == [
        (0, "start", "a new run"),
        (0, "validation", "before: EM 0.250"),
        (2, "restart", "rollout: died after 3 s (exit code 1)"),
    ]
    assert detail["restarts"] == {"rollout": 1}


WARNINGS: dict[str, tuple[dict[str, Any], str]] = {
    "guard": ({"guards": ["kl"]}, "step 5 tripped the guard 'kl', 5 times since step 1"),
    "skipped": ({"guards": ["skipped"]}, "was skipped, because a guard rolled the run back"),
    "failed": ({"failed": 4}, "20 of 40 trajectories of the last 5 steps failed"),
    "dead": ({"dead_groups": 2, "filtered_groups": 1}, "15 of 80 groups of the last 5 steps taught nothing"),
    "dropped": ({"dropped_stale": 2}, "10 groups of the last 5 steps were dropped: too old"),
    "late": ({"dropped_stragglers": 1}, "5 groups of the last 5 steps were dropped: too late"),
    "stale": ({"staleness_mean": 0.95}, "tokens are 0.95 versions old on average"),
    "mismatch": ({"logprob_diff_mean": 0.9}, "log-probabilities of trainer and engine differ by 0.9"),
    "masked": ({"is_masked": 0.5}, "50% of the tokens have no weight"),
    "truncated": ({"truncated_rate": 0.4}, "40% of the trajectories are truncated"),
    "idle": ({"seconds": {"wait": 9.0, "total": 10.0}}, "the trainer is idle 90% of its time"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_says_what_is_wrong(client: ConsoleClient, runs: Path, name: str) -> None:
    values, text = WARNINGS[name]
    (runs / "one/metrics.jsonl").write_text(write_lines(build_step(step, **values) for step in range(1, 6)))
    (warning,) = client.read("/runs/one")["warnings"]
    assert text in warning["text"]
    assert warning["step"] == 5


def test_a_sound_run_has_no_warnings(client: ConsoleClient) -> None:
    assert client.read("/runs/one")["warnings"] == []


def test_a_step_without_a_finite_loss_is_a_warning(client: ConsoleClient, runs: Path) -> None:
    steps = [build_step(1, loss=0.5), build_step(2, loss=math.nan)]
    (runs / "one/metrics.jsonl").write_text(write_lines(steps))
    assert [one["text"] for one in client.read("/runs/one")["warnings"]] == ["the last step has no finite loss"]
    steps[-1]["dead_groups"] = 256  # no group to train on
    (runs / "one/metrics.jsonl").write_text(write_lines(steps))
    assert "the last step has no finite loss" not in str(client.read("/runs/one")["warnings"])


def test_a_run_that_takes_no_step_and_one_that_stopped_are_warnings(client: ConsoleClient, runs: Path) -> None:
    steps = [build_step(step, time=NOW - 700 + step) for step in range(1, 6)]
    (runs / "one/metrics.jsonl").write_text(write_lines(steps))
    (warning,) = client.read("/runs/one")["warnings"]
    assert warning["text"].startswith("no step for 12 min (usually 1 s): the page Health says")
    age(runs / "one", 3 * 86400)
    (warning,) = client.read("/runs/one")["warnings"]
    assert warning["text"].startswith("nothing was written for 3 days: the run is stopped at step 5 of 10; ")


def test_figures_have_the_metrics_of_the_run(client: ConsoleClient, runs: Path) -> None:
    steps = [build_step(1, **{"em/nq": 0.5, "reward/format": 0.1, "kl_ref": 0.2})]
    (runs / "one/metrics.jsonl").write_text(write_lines(steps))
    detail = client.read("/runs/one")
    figures = {group["title"]: group for group in detail["groups"]}
    assert figures["Exact match of sampled answers"]["curves"] == {"em_mean": "all sources", "em/nq": "nq"}
    assert figures["Reward"]["curves"] == {"reward_mean": "mean", "reward/format": "format"}
    assert list(figures["Where the step's time goes"]["curves"]) == ["seconds.wait", "seconds.update"]
    assert "Entropy" not in figures
    assert {name for group in detail["groups"] for name in group["curves"]} <= set(detail["metrics"])
    assert detail["now"]["kl_ref"] == 0.2


def test_curves_are_the_columns_that_are_asked_for(client: ConsoleClient) -> None:
    found = client.read("/runs/one/curves", names=["em_mean", "nothing"], after=3)
    assert found["steps"] == [4, 5]
    assert found["columns"] == {"em_mean": [0.4, 0.5], "nothing": [None, None]}
    assert found["time"] == [NOW - 52, NOW - 50]
    assert client.read("/runs/one/curves", after=5) == {
        "steps": [],
        "time": [],
        "columns": {name: [] for name in client.read("/runs/one/curves")["columns"]},
    }


def test_a_name_that_no_run_has_is_a_sentence(client: ConsoleClient) -> None:
    for path in ("/runs/two", "/runs/two/curves", "/runs/two/events", "/runs/two/questions/x"):
        assert "there is no run" in client.read_problem(path, 404)


def test_an_object_store_has_the_same_pages(runs: Path) -> None:
    kept = UPath("memory://test-runs")
    for file in (runs / "one").rglob("*"):
        if file.is_file():
            target = kept / "one" / str(file.relative_to(runs / "one"))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    client = ConsoleClient(kept)
    (row,) = client.read("/runs")["runs"]
    assert (row["step"], row["em"]["mean"], row["problem"]) == (5, 0.25, None)
    assert client.read("/runs/one")["validations"][0]["count"] == 4
    assert client.read("/runs/one/questions")["total"] == 4


def test_names_that_are_no_text_are_left_out(client: ConsoleClient, runs: Path) -> None:
    shutil.copytree(runs / "one", runs / os.fsdecode(b"one-\xff"))
    (runs / "one/validation" / os.fsdecode(b"\xff.jsonl")).write_text("{}\n")
    assert [row["id"] for row in client.read("/runs")["runs"]] == ["one"]
    assert [row["label"] for row in client.read("/runs/one")["validations"]] == ["before"]
    assert client.read("/runs/one/facets")["places"] == ["before"]
