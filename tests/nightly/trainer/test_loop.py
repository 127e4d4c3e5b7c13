"""Whole runs of the loop in one process: recipes, validations beside the training, groups that never come."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from redis import Redis
from trainer_parts import ScriptedRollout, read_lines
from training_loop import BATCH, SAMPLES, model, read_metrics, train

from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Purpose, TrajectoryGroup
from forage_queue.streams.client import StreamClient
from forage_queue.trainer.batcher import Batch, Batcher
from forage_records.events import read_events
from forage_records.step_file import read_group_fates, step_file_path
from forage_runtime.settings import Settings
from forage_trainer.validation.evaluation import Validation
from forage_weights.digests import compute_digest
from forage_weights.trainer import publisher

__all__ = ["model", "train"]


class TurnedRollout(ScriptedRollout):
    """Scores with turns: each sample's two turns earn differently."""

    def _answer(self, prompt: Prompt, policy: Policy) -> TrajectoryGroup | None:
        group = super()._answer(prompt, policy)
        assert group is not None
        for row in group.trajectories:
            row.turn_ids[:] = [1] * 6 + [-1] * 7 + [2] * 5
            for turn, part in ((1, 0.1 * row.sample), (2, 0.7 - 0.1 * row.sample)):
                row.score.components.add(name=f"turn_{turn}", raw=2 * part, weighted=part)
            row.score.components.add(name="answer", raw=1.0, weighted=float(row.sample == 0))
            row.score.total = 0.7 + float(row.sample == 0)
        return group


class PartialRollout(ScriptedRollout):
    """Answers nothing for the first place of batch 2, and with equal rewards whatever is asked first elsewhere."""

    unanswered_attempt = 0
    has_left_out = threading.Event()

    def _answer(self, prompt: Prompt, policy: Policy) -> TrajectoryGroup | None:
        place = prompt.batch, prompt.position, prompt.attempt
        if prompt.purpose == Purpose.PURPOSE_TRAIN and place == (2, 0, self.unanswered_attempt):
            self.has_left_out.set()
            return None
        group = super()._answer(prompt, policy)
        assert group is not None
        if prompt.attempt == 0:
            for row in group.trajectories:
                row.score.total = 1.0
        return group


class LateRefillRollout(PartialRollout):
    """The same, but it answers what is asked first there too: the question that takes its place has no answer."""

    unanswered_attempt = 1


class UnhurriedRollout(ScriptedRollout):
    """Leaves the questions of validations between steps for later."""

    later = threading.Event()

    def _is_ready(self, prompt: Prompt, policy: Policy) -> bool:
        between = prompt.purpose == Purpose.PURPOSE_VALIDATION and prompt.batch > 0
        return super()._is_ready(prompt, policy) and (self.later.is_set() or not between)


class RestartedRollout(ScriptedRollout):
    """Has to load policy 1 anew, when a bit of it has been flipped; serves only what is as it was announced."""

    damaged = False

    def _is_ready(self, prompt: Prompt, policy: Policy) -> bool:
        file = Path(policy.uri) / "model.safetensors"
        if policy.version == 1 and not self.damaged:
            self.damaged = True
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        return super()._is_ready(prompt, policy) and compute_digest(file) == policy.digest


def test_a_damaged_policy_that_no_engine_can_load_is_published_again(
    train: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("forage_queue.trainer.batcher.SILENCE_S", 0.05)
    monkeypatch.setattr(publisher, "LIVELY_S", -1)  # no replica gives a sign of life
    wait = ["trainer.max_staleness=0", "trainer.batch_timeout_s=300"]
    read_metrics(train(*wait, rollout=RestartedRollout))
    assert "policy_published_again" in capsys.readouterr().err


def test_multi_turn_grpo_steps_on_scores_with_turns(train: Callable[..., Settings]) -> None:
    settings = train(
        "trainer.algorithm.adv_estimator=grpo_multiturn", "trainer.rollout_data_freq=2", rollout=TurnedRollout
    )
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in read_metrics(settings))
    kept = step_file_path(settings.run.folder, 2)
    assert list(kept.parent.iterdir()) == [kept], "the trajectories of every second step are kept"
    rows = pq.read_table(kept).to_pylist()
    assert len(rows) == BATCH * SAMPLES
    for row in rows:
        first, between, second = row["advantages"][:6], row["advantages"][6:13], row["advantages"][13:]
        assert len(set(first)) == len(set(second)) == 1
        assert first[0] != second[0]
        assert not any(between)


def test_the_kl_coefficient_adapts_and_survives_a_restart(
    train: Callable[..., Settings],
) -> None:
    kl = ["trainer.algorithm.use_kl_in_reward=true", "trainer.actor.use_kl_loss=false"]
    kl += ["trainer.algorithm.kl_ctrl.type=adaptive", "trainer.algorithm.kl_ctrl.horizon=60"]
    kl += ["trainer.algorithm.kl_ctrl.kl_coef=0.1", "trainer.algorithm.kl_ctrl.target_kl=1000"]
    train(*kl, "trainer.total_training_steps=2")
    result = read_metrics(train(*kl, "trainer.total_training_steps=4"))
    # Far below its target the KL lowers the coefficient by 0.2 * rows / horizon a step.
    lower = 1 - 0.2 * BATCH * SAMPLES / 60
    assert [line["kl_reward_coef"] for line in result] == pytest.approx([0.1 * lower**n for n in range(4)])
    assert result[0]["kl_reward"] == pytest.approx(0, abs=1e-5)
    assert result[-1]["kl_reward"] != result[0]["kl_reward"]


def test_trackers_receive_every_step_and_validation(train: Callable[..., Settings]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = train("trainer.logger=[tensorboard]", "trainer.test_freq=2")
    events = EventAccumulator(str(settings.run.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("actor/grad_norm")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("val-core/world_facts/em/mean@1")] == [0, 2, 3]


def test_an_overlapped_validation_survives_a_restart_and_its_checkpoint_is_kept(
    train: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Validation.finish

    def die_at_the_end(self: Validation) -> dict[str, Any] | None:
        if self.open_versions == {2}:
            raise InterruptedError
        return finish(self)

    beside = ["trainer.validation_mode=overlapped", "trainer.test_freq=2", "trainer.total_training_steps=4"]
    beside += ["trainer.max_ckpt_to_keep=1", "trainer.save_freq=1"]
    UnhurriedRollout.later.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Validation, "finish", die_at_the_end)
        with pytest.raises(InterruptedError):
            train(*beside, rollout=UnhurriedRollout)
    UnhurriedRollout.later.set()
    settings = train(*beside)
    read_metrics(settings)
    result = json.loads((settings.run.folder / "validation" / "step-2.json").read_text())
    assert (result["version"], result["count"], result["later_version_share"]) == (2, 2, 1.0)
    checkpoints = settings.run.folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "groups", "latest", "step_2", "step_4"]
    assert (checkpoints / "best").read_text() == "step_2\n"


@pytest.mark.parametrize("rollout", [PartialRollout, LateRefillRollout])
def test_dropped_groups_are_in_the_ledger_and_refills_are_counted(
    train: Callable[..., Settings], rollout: type[PartialRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes only in batch 2, once its first place has been left out."""
    collect, seconds, collected = Batcher._collect, [0.0], [0]

    def note_batch(self: Batcher, number: int, *rest: Any) -> Batch:
        collected[0] = number
        return collect(self, number, *rest)

    def tell_time() -> float:
        seconds[0] += 20.0 if collected[0] == 2 and rollout.has_left_out.is_set() else 0.0
        return seconds[0]

    rollout.has_left_out.clear()
    monkeypatch.setattr(Batcher, "_collect", note_batch)
    monkeypatch.setattr("forage_queue.trainer.batcher.time", SimpleNamespace(monotonic=tell_time, time=time.time))
    monkeypatch.setattr("forage_queue.trainer.batcher._BLOCK_S", 0.02)
    drop = ["trainer.straggler_timeout_s=10", "trainer.max_staleness=0"]
    refill = ["trainer.algorithm.filter_groups=true", "trainer.max_refills=1"]
    settings = train(*drop, *refill, "trainer.rollout_data_freq=1", rollout=rollout)
    result = read_metrics(settings)
    assert [line["dropped_stragglers"] for line in result] == [0, 1, 0]
    assert [line["refilled_groups"] for line in result] == [2, 1, 2]
    assert [line["filtered_groups"] for line in result] == [0, 0, 0]
    assert [line["trajectories"] for line in result] == [6, 3, 6]
    assert all(line["grad_norm"] > 0 for line in result)
    ledger = StreamClient(settings.redis, settings.run.id).read_ledger()
    issues = StreamClient(settings.redis, settings.run.id).read_issued()
    asked = [issue.group_uid for issue in issues if (issue.batch, issue.position) == (2, 0)]
    assert len(asked) == rollout.unanswered_attempt + 1
    missing = asked[-1]
    fates = read_group_fates(step_file_path(settings.run.folder, 2)) or []
    late = [fate.uid for fate in fates if fate.reason == "straggler: it did not arrive in time"]
    assert late == [missing]
    assert [fate.fate for fate in fates if fate.position == 1] == ["dropped", "trained"], "refilled, then trained on"
    assert [list(ledger[step].dropped_group_uids) for step in (1, 2, 3)] == [[], [missing], []]
    assert [len(ledger[step].group_uids) for step in (1, 2, 3)] == [2, 1, 2]
    streams = StreamClient(settings.redis, settings.run.id)
    assert [streams.count_backlog(name) for name in (streams.prompts, streams.trajectories)] == [0, 0]


@pytest.mark.parametrize("mode", ["paused", "overlapped"])
def test_watched_questions_are_the_same_all_run_long_and_change_nothing_else(
    train: Callable[..., Settings], mode: str
) -> None:
    watch = ["trainer.watch_questions.freq=2", "trainer.watch_questions.count=3", f"trainer.validation_mode={mode}"]
    train(*watch, "trainer.total_training_steps=3")
    settings = train(*watch, "trainer.total_training_steps=4", "trainer.logger=[tensorboard]")
    read_metrics(settings)
    folder = settings.run.folder
    labels = ["watch-0", "watch-2", "watch-3", "watch-4"]
    assert sorted(file.stem for file in (folder / "validation").glob("watch-*.json")) == labels
    asked = [[row["uid"] for row in read_lines(folder / "validation" / f"{label}.jsonl")] for label in labels]
    assert asked == [asked[0]] * 4
    assert len(asked[0]) == 3
    assert all(uid.startswith("world_facts/train/") and uid.endswith("/0") for uid in asked[0])
    for label in labels:
        result = json.loads((folder / "validation" / f"{label}.json").read_text())
        assert (result["version"], result["count"], result["failed"]) == (int(label[6:]), 3, 0)
    row = read_lines(folder / "validation" / "watch-2.jsonl")[0]
    assert (row["status"], row["sample"], row["reason"], row["data_source"]) == ("OK", 0, None, "world_facts")
    assert row["policy_version_min"] >= 2
    assert set(row["timings"]) == {"queued_s", "generate_s", "retrieve_s", "score_s", "total_s"}
    assert [part["name"] for part in row["components"]] == ["format"]
    assert (folder / "checkpoints" / "best").read_text() == "step_4\n", "not by watch-3, whose EM is 1"
    streams = StreamClient(settings.redis, settings.run.id)
    assert [streams.count_backlog(name) for name in (streams.prompts, streams.trajectories)] == [0, 0]
    assert not list(Redis.from_url(settings.redis.url).scan_iter("*watch*")), "nothing of them is left"
    events = [(event.kind, event.step) for event in read_events(folder)]
    assert events[0] == ("start", 0)
    assert [step for kind, step in events if kind == "watch"] == [0, 2, 3, 4]
    assert [step for kind, step in events if kind == "validation"] == [0, 3, 4]
    assert ("resume", 3) in events
    assert ("checkpoint", 2) in events, "what was watched can be sampled again"


def test_a_finished_run_that_validates_can_be_extended(train: Callable[..., Settings]) -> None:
    train("trainer.test_freq=2", "trainer.total_training_steps=2")
    settings = train("trainer.test_freq=2", "trainer.total_training_steps=4")
    read_metrics(settings)
    files = sorted((settings.run.folder / "validation").glob("*.json"))
    versions = {file.stem: json.loads(file.read_text())["version"] for file in files}
    assert versions == {"after": 4, "before": 0, "step-2": 2}


def test_without_staleness_every_step_waits_for_its_policy(
    train: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher.Publisher, "begin", lambda *_: pytest.fail("beside a step"))
    read_metrics(train("trainer.max_staleness=0", "trainer.save_freq=9"))
