"""The whole loop with trainer.batching=ready, on a random Qwen2 and a real server, through a crash to the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_parts import ScriptedRollout, read_lines, write_model, write_questions

from forage_cli.runs.ledger import GroupCounts, count_groups
from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Purpose
from forage_queue.checker.check import Limits, check_operations
from forage_queue.checker.operations import read_history
from forage_queue.streams.client import StreamClient
from forage_queue.streams.history import open_history
from forage_queue.trainer.batcher import Batch
from forage_records.questions import read_questions
from forage_records.step_file import Fate, read_group_fates, step_file_path
from forage_runtime.errors import UserError
from forage_runtime.settings import RedisSettings, Settings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.loop import TrainingLoop
from forage_trainer.step import PolicyStep

BATCH, SAMPLES, STEPS = 2, 3, 5
SLOW = "1/0"


class SlowRollout(ScriptedRollout):
    """Takes until policy 2 for the first place of the first batch, and has sampled it under policy 0 then."""

    def _is_ready(self, prompt: Prompt, policy: Policy) -> bool:
        is_slow = prompt.purpose == Purpose.PURPOSE_TRAIN and f"{prompt.batch}/{prompt.position}" == SLOW
        return super()._is_ready(prompt, policy) and not (is_slow and prompt.attempt == 0 and policy.version < 2)


@pytest.fixture
def train(tmp_path: Path, redis_server: RedisSettings) -> Callable[..., Settings]:
    """Run a trainer to its end; its settings say where everything is."""
    model = write_model(tmp_path / "model")
    write_questions(tmp_path / "train.parquet", 12)
    write_questions(tmp_path / "test.parquet", 2, split="test")

    def run(*overrides: str) -> Settings:
        small = [
            f"run.dir={tmp_path / 'runs'}",
            "run.record_history=true",
            f"redis.url={redis_server.url}",
            f"model.path={model}",
            f"data.train_files=[{tmp_path / 'train.parquet'}]",
            f"data.val_files=[{tmp_path / 'test.parquet'}]",
            f"data.train_batch_size={BATCH}",
            "trainer.actor.ppo_mini_batch_size=1",
            f"rollout.n={SAMPLES}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=2",
            "trainer.rollout_data_freq=1",
            "trainer.threads=1",
            "trainer.batching=ready",
        ]
        settings = load_settings(None, [*small, *overrides], {})
        questions = read_questions(settings.data.train_paths), read_questions(settings.data.val_files)
        streams = StreamClient(settings.redis, settings.run.id, history=open_history(settings.run, "trainer"))
        TrainingLoop(settings, streams, PolicyWorker(settings), *questions, 0, Stop(), Health()).run()
        return settings

    return run


def test_a_run_goes_on_without_its_slowest_group_and_has_it_in_the_end(
    train: Callable[..., Settings], redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, crashed = PolicyStep.__call__, []

    def crash_once(self: PolicyStep, batch: Batch, *rest: Any) -> dict[str, Any]:
        if batch.number == 4 and not crashed:
            crashed.append(batch)
            raise InterruptedError
        return take(self, batch, *rest)

    monkeypatch.setattr(PolicyStep, "__call__", crash_once)
    defaults = load_settings(None, [], {})
    rollout = SlowRollout(redis_server, defaults.run.id, frozenset({SLOW}))
    rollout.start()
    try:
        with pytest.raises(InterruptedError):
            train()
        settings = train()
        with pytest.raises(
            UserError, match=r"trained with trainer\.batching=ready up to step 5.*set trainer\.batching"
        ):
            train("trainer.batching=strict")
        train("trainer.total_training_steps=6")
    finally:
        rollout.end()
    folder = settings.run.folder
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["loss"] == line["loss"] for line in lines)
    streams = StreamClient(redis_server, settings.run.id)
    assert count_groups(streams) == GroupCounts(6 * BATCH, 6 * BATCH, 0, 0)
    assert streams.count_backlog(streams.trajectories) == streams.count_backlog(streams.prompts) == 0
    first = {issue.group_uid for issue in streams.read_issued() if (issue.batch, issue.position) == (1, 0)}
    steps = [step for step, entry in streams.read_ledger().items() if first & {*entry.group_uids}]
    assert len(steps) == 1
    assert steps[0] > 2, "two steps went on without it"
    [trained] = [fate for fate in read_group_fates(step_file_path(folder, steps[0])) or () if fate.uid in first][-1:]
    assert (trained.fate, trained.attempt) == (Fate.TRAINED, 1), "what it had first was too old"
    report = check_operations(read_history(folder), Limits(BATCH, 6, 1, "ready"))
    # The scripted rollout service records nothing: what it claimed and finished cannot be founded.
    assert [violation.sentence for violation in report.violations if violation.rule != "unfounded"] == []
    assert report.is_complete
