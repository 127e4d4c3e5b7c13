"""Validation through a real server: every question once, failures asked again, the result written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from arrived_groups import arrive
from full_disk import limit_file_size
from prometheus_client import REGISTRY
from trainer_parts import build_trajectory, read_lines
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import GroundTruth, Policy, Prompt, Purpose, Status, TrajectoryGroup
from forage_queue.streams.client import StreamClient
from forage_queue.streams.prompt_identity import build_group
from forage_queue.trainer.batcher import BatchTimeoutError
from forage_records.questions import Question
from forage_runtime.errors import DiskFullError, FencedError
from forage_runtime.retries import Retries
from forage_runtime.settings import RedisSettings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.reporting.metrics import compute_trajectory_metrics
from forage_trainer.reporting.progress import StateFile
from forage_trainer.validation.answers import StoredAnswers
from forage_trainer.validation.evaluation import RETRIES, Validation
from forage_trainer.validation.schedule import choose_watched
from forage_trajectory.codec import pack_group

COUNT = 4
POLICY = Policy(version=6, epoch=2, uri="u", digest="d")


class Answering:
    """Answers all prompts of the stream with the groups of `script`; keeps the prompts."""

    def __init__(self, streams: StreamClient, script: Callable[[Prompt], TrajectoryGroup]) -> None:
        self._streams = streams
        self._script = script
        self.prompts: list[Prompt] = []

    def __call__(self) -> None:
        for entry in self._streams.claim_prompts("script", 1000, 0.01):
            self.prompts.append(entry.message)
            self._streams.finish(entry, pack_group(self._script(entry.message)))


class AskedAgain(StateFile):
    """A state file that lets the script answer whenever progress is written."""

    def __init__(self, folder: Path, then: Callable[[], None]) -> None:
        super().__init__(folder)
        self._then = then

    def set(self, *arguments: object, **_: object) -> None:
        super().set(*arguments)  # type: ignore[arg-type]
        self._then()


def build_reply(prompt: Prompt, status: Status.ValueType = Status.STATUS_OK) -> TrajectoryGroup:
    right = float(prompt.position % 2)
    return build_group(prompt, [build_trajectory(prompt.group_uid, 0, right, status=status)])


def run(
    validation: Validation, label: str, policy: Policy, meanwhile: Callable[[], object] = lambda: None
) -> dict[str, Any] | None:
    validation.begin(label, policy)
    meanwhile()
    return validation.finish()


@pytest.fixture
def make(
    redis_server: RedisSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Validation, Answering, StreamClient]]:
    monkeypatch.setattr("forage_trainer.validation.evaluation._BLOCK_S", 0.02)

    def build(
        script: Callable[[Prompt], TrajectoryGroup] = build_reply,
        sources: Sequence[str] = ("q",) * COUNT,
        more: Sequence[str] = (),
    ) -> tuple[Validation, Answering, StreamClient]:
        overrides = [f"redis.url={redis_server.url}", f"run.dir={tmp_path}", "run.id=v", "trainer.batch_timeout_s=300"]
        settings = load_settings(None, [*overrides, *more], {})
        streams = StreamClient(settings.redis, "v", WAIT_S)
        streams.create_groups()
        stop, health = Stop(), Health()
        rows = [
            Question(source, "test", i, (), GroundTruth(targets=[f"t{i}"]), f"question {i}")
            for i, source in enumerate(sources)
        ]
        answering = Answering(streams, script)
        state = AskedAgain(tmp_path / "v", answering)
        return Validation(settings, streams, rows, state, Retries(stop, health), health), answering, streams

    return build


def test_every_question_is_issued_once_and_greedily(make: Callable, tmp_path: Path) -> None:
    validation, answering, streams = make()
    result = run(validation, "after", POLICY, meanwhile=answering)
    assert (result["em"], result["count"], result["failed"], result["version"]) == (0.5, COUNT, 0, 6)
    assert result["format_rate"] == 1.0
    for prompt in answering.prompts:
        assert (prompt.purpose, prompt.samples, prompt.sampling.temperature) == (Purpose.PURPOSE_VALIDATION, 1, 0.0)
        assert (prompt.batch, prompt.min_policy_version) == (6, 6)
        assert prompt.reply_stream == streams.key("validation-after")
    assert json.loads((tmp_path / "v/validation/after.json").read_text()) == result
    lines = read_lines(tmp_path / "v/validation/after.jsonl")
    assert [(r["question"], r["targets"], r["em"]) for r in lines] == [
        (f"question {i}", [f"t{i}"], float(i % 2)) for i in range(COUNT)
    ]
    assert lines[0]["spans"] == [{"role": "model", "text": "text"}]
    assert json.loads((tmp_path / "v/state.json").read_text()) == {
        "phase": "validating", "detail": "after", "done": COUNT, "total": COUNT,
    }  # fmt: skip
    assert not streams._redis.exists(streams.key("validation-after"))


def test_a_replaced_trainer_writes_no_result(make: Callable, tmp_path: Path) -> None:
    validation, answering, streams = make()
    streams.acquire_epoch()
    validation.begin("after", POLICY)
    answering()
    StreamClient(streams._settings, "v", WAIT_S).acquire_epoch()
    with pytest.raises(FencedError, match="has taken over"):
        validation._end(validation._open)  # all answers were claimed before
    assert list((tmp_path / "v").rglob("after.json*")) == []


def test_exact_match_is_reported_by_data_source_without_failures(make: Callable, tmp_path: Path) -> None:
    def answer_prompt(prompt: Prompt) -> TrajectoryGroup:
        return build_reply(prompt, Status.STATUS_TIMEOUT if prompt.data_source == "dead" else Status.STATUS_OK)

    sources = ["nq", "nq", "hotpotqa", "dead", "nq", "hotpotqa", "nq"]  # positions 1, 3, 5 are answered right
    validation, answering, _ = make(answer_prompt, sources)
    result = run(validation, "step-6", POLICY, meanwhile=answering)
    assert {name: em for name, em in result.items() if name.startswith("em/")} == {
        "em/dead": None, "em/hotpotqa": 0.5, "em/nq": 0.25,
    }  # fmt: skip
    assert (result["em"], result["count"], result["failed"]) == (pytest.approx(2 / 6), 7, 1)


def test_scores_of_all_validations_are_read_back_by_version(make: Callable, tmp_path: Path) -> None:
    validation, answering, _ = make()
    assert validation.scores() == {}
    for version in (0, 6):
        run(validation, f"step-{version}", Policy(version=version, epoch=2), meanwhile=answering)
    (tmp_path / "v/validation/step-9.json").write_text('{"version": 9, "em": null}')
    (tmp_path / "v/validation/step-12.json").write_text("{")
    assert validation.scores() == {0: 0.5, 6: 0.5}


def test_a_validation_with_a_result_is_not_repeated_for_the_same_version(make: Callable) -> None:
    validation, answering, _ = make()
    run(validation, "after", POLICY, meanwhile=answering)
    assert run(validation, "after", POLICY, meanwhile=answering) is None
    assert len(answering.prompts) == COUNT
    later = Policy(version=9, epoch=3)
    assert run(validation, "after", later, meanwhile=answering)["version"] == 9


def test_a_failed_question_is_issued_again_but_a_wrong_answer_is_not(make: Callable, tmp_path: Path) -> None:
    def answer_prompt(prompt: Prompt) -> TrajectoryGroup:
        fails = prompt.position == 0 or (prompt.position == 1 and prompt.attempt == 0)
        return build_reply(prompt, Status.STATUS_TIMEOUT if fails else Status.STATUS_OK)

    validation, answering, _ = make(answer_prompt)
    result = run(validation, "before", POLICY, meanwhile=answering)
    asked = [(p.position, p.attempt) for p in answering.prompts]
    assert sorted(asked) == [(0, n) for n in range(RETRIES + 1)] + [(1, 0), (1, 1), (2, 0), (3, 0)]
    assert (result["failed"], result["count"]) == (1, COUNT)
    assert result["em"] == pytest.approx(2 / 3)
    assert read_lines(tmp_path / "v/validation/before.jsonl")[0]["failed"] is True


def test_training_continues_while_answers_arrive(make: Callable, tmp_path: Path) -> None:
    held: list[Prompt] = []

    def answer_prompt(prompt: Prompt) -> TrajectoryGroup:
        held.append(prompt)
        return build_reply(
            prompt, Status.STATUS_TIMEOUT if (prompt.position, prompt.attempt) == (2, 0) else Status.STATUS_OK
        )

    validation, answering, _ = make(answer_prompt)
    assert validation.poll() is None
    validation.begin("step-6", POLICY)
    assert validation.poll() is None
    answering()
    assert validation.poll() is None, "the failed question is asked again"
    assert validation.open_versions == {6}
    assert not list((tmp_path / "v/validation").glob("*.json*"))
    answering()
    result = validation.poll()
    assert (result["em"], result["count"], result["failed"], result["version"]) == (0.5, COUNT, 0, 6)
    assert json.loads((tmp_path / "v/validation/step-6.json").read_text()) == result
    assert (validation.open_versions, validation.poll(), validation.finish()) == (set(), None, None)
    assert not (tmp_path / "v/state.json").exists(), "the phase is training's"


def test_the_share_of_tokens_of_later_policies_is_reported(make: Callable) -> None:
    def answer_prompt(prompt: Prompt) -> TrajectoryGroup:
        group = build_reply(prompt)
        row = group.trajectories[0]  # 6 own tokens, 7 observed, 5 own
        begins = {0: [], 1: [(6, 0)], 2: [(6, 0), (7, 13)], 3: [(9, 0)]}[prompt.position]
        ends = [*(begin for _, begin in begins[1:]), len(row.loss_mask)]
        del row.segments[:]
        for (version, begin), end in zip(begins, ends, strict=False):
            row.segments.add(version=version, epoch=2, begin=begin, end=end)
        return group

    validation, answering, _ = make(answer_prompt)
    assert run(validation, "step-6", POLICY, answering)["later_version_share"] == pytest.approx((5 + 11) / 33)


def test_an_open_validation_continues_after_a_restart(make: Callable, tmp_path: Path) -> None:
    first, answering, _ = make()
    first.begin("step-6", POLICY)
    answering()
    assert len(first._open.arrivals.claim(0.1)) == COUNT, "taken, and nothing written"
    second, nobody, _ = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.resume()
    assert second.open_versions == {6}
    assert second.poll()["em"] == 0.5
    assert (nobody.prompts, second.state_dict()) == ([], {})
    third, _, _ = make()
    third.load_state_dict(first.state_dict())
    third.resume()
    assert third.open_versions == set(), "its result is there"


def test_a_restarted_trainer_reclaims_the_answers_of_the_one_before(make: Callable) -> None:
    validation, answering, streams = make()
    stream = streams.key("validation-after")
    validation.begin("after", POLICY)
    answering()
    assert len(streams.claim_groups(stream, 2, 0.1)) == 2
    result = run(validation, "after", POLICY)
    assert result["count"] == COUNT
    assert len(answering.prompts) == COUNT


BOUND = ("data.train_batch_size=2", "rollout.n=3")


def test_redis_never_holds_more_answers_than_a_batch_has_trajectories(make: Callable, tmp_path: Path) -> None:
    validation, answering, streams = make(sources=("q",) * 40, more=BOUND)
    stream, held = streams.key("validation-step-6"), []

    def measure() -> int:
        held.append(streams.count_backlog(stream) + streams.count_backlog(streams.prompts))
        return held[-1]

    validation.begin("step-6", POLICY)
    while validation.open_versions:
        measure()
        answering()
        measure()
        result = validation.poll()
    assert result["count"] == 40
    assert result["em"] == 0.5
    assert max(held) == 6
    assert sorted((p.position, p.attempt) for p in answering.prompts) == [(i, 0) for i in range(40)]
    assert not list((tmp_path / "v/validation/answers").iterdir())


def test_answers_that_left_redis_outlive_the_trainer(make: Callable, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("forage_queue.trainer.batcher.SILENCE_S", 0.0)
    first, answering, _ = make(sources=("q",) * 20, more=BOUND)
    first.begin("step-6", POLICY)
    for _ in range(2):
        answering()
        assert first.poll() is None
    # Killed while it wrote an answer, and another one is damaged: two lines that are no answers.
    [file] = (tmp_path / "v/validation/answers").iterdir()
    good = file.read_bytes().splitlines(keepends=True)
    assert len(good) == 12
    file.write_bytes(b"".join([good[0].replace(b" ", b" x", 1), *good[1:], good[0][:100]]))
    second, again, _ = make(sources=("q",) * 20, more=BOUND)
    second.load_state_dict(first.state_dict())
    again.prompts = answering.prompts
    second.resume()
    result = second.finish()
    assert (result["count"], result["failed"], result["em"]) == (20, 0, 0.5)
    asked = sorted((p.position, p.attempt) for p in answering.prompts)
    assert asked == [(0, 0), (0, 1), *((i, 0) for i in range(1, 20))], "only the damaged one is asked again"
    assert not list((tmp_path / "v/validation/answers").iterdir())


def test_an_answer_that_was_stored_and_not_yet_discarded_counts_once(make: Callable, monkeypatch: Any) -> None:
    first, answering, streams = make(more=BOUND)
    first.begin("after", POLICY)
    answering()
    monkeypatch.setattr(first._open.arrivals, "discard", lambda ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.poll()
    assert streams.count_backlog(streams.key("validation-after")) == COUNT
    result = run(make(more=BOUND)[0], "after", POLICY)
    assert (result["count"], result["em"]) == (COUNT, 0.5)
    assert len(answering.prompts) == COUNT


def test_a_disk_that_is_full_loses_no_answer(make: Callable, tmp_path: Path, monkeypatch: Any) -> None:
    validation, answering, streams = make()
    validation.begin("after", POLICY)
    answering()
    stored = StoredAnswers(tmp_path / "v/validation", "after", 0)
    monkeypatch.setattr("forage_runtime.retries.DISK_PATIENCE_S", -1.0)
    with pytest.raises(DiskFullError, match=r"answers/after\.0 cannot be written"), limit_file_size(200):
        validation.poll()
    assert streams.count_backlog(streams.key("validation-after")) == COUNT, "nothing is discarded"
    assert list(stored.read()) == []
    assert run(make()[0], "after", POLICY)["count"] == COUNT


def test_a_silent_rollout_service_is_named(make: Callable) -> None:
    validation, _, _ = make(lambda prompt: TrajectoryGroup(batch=99), more=["trainer.batch_timeout_s=0.05"])
    with pytest.raises(BatchTimeoutError, match=r"'after': 4 of 4 answers missing.*rollout service"):
        run(validation, "after", POLICY)


def test_failed_trajectories_are_in_no_mean() -> None:
    valid = [build_trajectory("a", i, float(i == 0), version=5) for i in range(2)]
    failed = build_trajectory("a", 2, 7.0, version=3, status=Status.STATUS_INTERNAL)
    unjudged = build_trajectory("a", 3, 7.0, version=4, score_status=Status.STATUS_TIMEOUT)
    metrics = compute_trajectory_metrics([arrive(TrajectoryGroup(trajectories=[*valid, failed, unjudged]))], version=5)
    assert metrics["reward_mean"] == 0.5
    assert metrics["em_mean"] == 0.5
    assert metrics["failed"] == 2
    assert (metrics["staleness_max"], metrics["staleness_mean"]) == (2, 0.75)


def test_a_batch_without_a_valid_trajectory_has_no_means() -> None:
    failed = build_trajectory("a", 2, 7.0, status=Status.STATUS_INTERNAL, turns=())
    metrics = compute_trajectory_metrics([arrive(TrajectoryGroup(trajectories=[failed]))], version=5)
    assert (metrics["reward_mean"], metrics["em_mean"], metrics["staleness_max"]) == (None, None, None)


def test_watched_questions_follow_from_the_seed_and_are_spread_over_the_files() -> None:
    rows = [Question("q", "train", i, (), GroundTruth(), f"question {i}") for i in range(1000)]

    def choose(seed: int, count: int = 8) -> list[int]:
        watch = [f"run.seed={seed}", f"trainer.watch_questions.count={count}"]
        return [question.index for question in choose_watched(rows, load_settings(None, watch, {}))]

    assert choose(1) == choose(1) == sorted(set(choose(1)))
    assert choose(1) != choose(2)
    assert set(choose(1, 4)) < set(choose(1)), "with more questions the others stay"
    assert 300 < sum(sum(choose(seed)) for seed in range(50)) / 400 < 700
    assert choose(1, 5000) == list(range(1000))


def test_watched_questions_are_in_no_score_and_no_metric_of_validations(
    make: Callable[..., tuple[Validation, Answering, StreamClient]],
) -> None:
    validation, answering, _ = make()
    result = run(validation, "watch-6", POLICY, answering)
    assert result is not None
    assert result["em"] == 0.5
    assert validation.scores() == {}
    assert REGISTRY.get_sample_value("forage_trainer_validation_em", {"label": "watch-6"}) is None
    run(validation, "step-6", POLICY, answering)
    assert validation.scores() == {6: 0.5}
    assert REGISTRY.get_sample_value("forage_trainer_validation_em", {"label": "step-6"}) == 0.5


def test_a_watched_question_needs_no_exact_match(
    make: Callable[..., tuple[Validation, Answering, StreamClient]], tmp_path: Path
) -> None:
    def reply_unjudged(prompt: Prompt) -> TrajectoryGroup:
        group = build_reply(prompt)
        group.trajectories[0].validation_score.Clear()
        group.trajectories[0].score.status = Status.STATUS_OK if prompt.position else Status.STATUS_INTERNAL
        return group

    validation, answering, _ = make(reply_unjudged)
    watched = run(validation, "watch-6", POLICY, answering)
    assert watched is not None
    assert (watched["em"], watched["count"], watched["failed"]) == (None, COUNT, 1), "without a reward it failed"
    rows = read_lines(tmp_path / "v" / "validation" / "watch-6.jsonl")
    assert [(row["em"], bool(row["spans"])) for row in rows] == [
        (None, False),
        (None, True),
        (None, True),
        (None, True),
    ]
    held_out = run(validation, "step-6", POLICY, answering)
    assert held_out is not None
    assert held_out["failed"] == COUNT, "of which the exact match is all that is asked"
