"""Training with probes of the policy and a penalty by probes of trajectories."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from completions_server import CompletionsServer
from probing_parts import (
    CharacterRollout,
    Sampler,
    answer_early,
    sampler,
    scripted,
    settings,
    shared,
)
from trainer_parts import read_lines
from waiting import WAIT_S

from forage_queue.streams.client import StreamClient
from forage_records.questions import Questions, read_questions
from forage_records.step_file import read_step, step_file_path
from forage_runtime.settings import RedisSettings, Settings
from forage_runtime.stop import Stop, Stopped
from forage_runtime.telemetry.health import Health
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.loop import TrainingLoop

__all__ = ["sampler", "scripted", "settings", "shared"]


class OneProcess:
    """The trainer's loop on these services."""

    def __init__(self, settings: Settings, redis: RedisSettings, sampler: Sampler) -> None:
        self._settings = settings
        self._redis = redis
        self.stop = Stop()
        sampler.serving = StreamClient(redis, settings.run.id).read_policy

    def run(self) -> None:
        settings = self._settings
        questions = read_questions(settings.data.train_paths), read_questions(settings.data.val_files)
        few = Questions(questions[1].rows[:2], questions[1].digest, {})
        streams = StreamClient(self._redis, settings.run.id)
        TrainingLoop(settings, streams, PolicyWorker(settings), questions[0], few, 0, self.stop, Health()).run()


SMALL = (
    "data.train_batch_size=2",
    "trainer.actor.ppo_mini_batch_size=2",
    "rollout.n=3",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=3",
    "trainer.threads=1",
    "trainer.save_freq=1",
    "trainer.rollout_data_freq=1",
    "trainer.probe.points=4",
    "trainer.probe.samples=2",
    "trainer.algorithm.probe_penalty.coef=2",
)


def test_training_probes_policy_and_trajectories_and_repeats_a_stopped_probe(
    settings: Callable[..., Settings],
    scripted: CompletionsServer,
    sampler: tuple[Sampler, str],
    redis_server: RedisSettings,
) -> None:
    own = settings(*SMALL, f"redis.url={redis_server.url}")
    folder = own.run.folder
    player = CharacterRollout(redis_server, own.run.id)
    player.start()
    process = OneProcess(own, redis_server, sampler[0])

    has_stopped = threading.Event()

    def answer_and_stop(context: str, chance: random.Random) -> str:
        if (folder / "checkpoints/step_2").exists():
            process.stop.request()
            assert has_stopped.wait(WAIT_S)
        return answer_early(context, chance)

    scripted.policy = answer_and_stop
    try:
        with pytest.raises(Stopped):
            process.run()
        has_stopped.set()
        assert sorted(file.name for file in folder.glob("probes/*")) == ["step-0.json"]
        assert "val-probe/count" not in read_lines(folder / "metrics.jsonl")[1]
        scripted.policy = answer_early
        OneProcess(own, redis_server, sampler[0]).run()
    finally:
        player.end()
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert sorted(file.name for file in folder.glob("probes/*")) == ["step-0.json", "step-2.json", "step-3.json"]
    assert [line.get("val-probe/count") for line in lines] == [None, 2, 2]
    assert lines[1]["val-probe/overconfidence/mean"] == 0.75  # c = 1, 1, 0, 0, 0 and w = 0.5, 0.25, 0, -0.25, -0.5
    assert [line["probe_overconfidence"] for line in lines] == pytest.approx([0.75] * 3)
    assert [line["probe_penalty"] for line in lines] == pytest.approx([1.5] * 3)
    assert [(line["probe_count"], line["probe_failed"]) for line in lines] == [(2, 0)] * 3
    assert all(line["seconds"]["probe"] > 0 for line in lines)
    rows = list(read_step(step_file_path(folder, 1)))
    assert [row.overconfidence for row in rows] == [0.75, None, None] * 2
    for probed, _, equal in (rows[:3], rows[3:]):
        assert probed.trajectory.score.total == equal.trajectory.score.total
        assert probed.advantages is not None
        assert equal.advantages is not None
        for own_value, other, state in zip(
            probed.advantages, equal.advantages, probed.trajectory.loss_mask, strict=True
        ):
            assert own_value == (pytest.approx(other - 1.5) if state else 0.0)
        assert probed.returns == equal.returns
