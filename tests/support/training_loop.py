"""The whole training loop in one process, on a random Qwen2 and a real server, with a scripted rollout service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer_parts import ScriptedRollout, read_lines, write_model, write_questions

from forage_queue.streams.client import StreamClient
from forage_queue.streams.payloads import Payloads
from forage_records.questions import read_questions
from forage_runtime.settings import RedisSettings, Settings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.loop import TrainingLoop

BATCH, SAMPLES = 2, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("loop") / "model")


@pytest.fixture
def train(model: Path, tmp_path: Path, redis_server: RedisSettings) -> Iterator[Callable[..., Settings]]:
    """Run the trainer to its end; its settings say where everything is."""
    write_questions(tmp_path / "train.parquet", 10)
    write_questions(tmp_path / "test.parquet", 2, split="test")
    players: list[ScriptedRollout] = []

    def run(*overrides: str, rollout: type[ScriptedRollout] = ScriptedRollout) -> Settings:
        small = [
            f"run.dir={tmp_path / 'runs'}",
            f"redis.url={redis_server.url}",
            f"model.path={model}",
            f"data.train_files=[{tmp_path / 'train.parquet'}]",
            f"data.val_files=[{tmp_path / 'test.parquet'}]",
            f"data.train_batch_size={BATCH}",
            f"trainer.actor.ppo_mini_batch_size={BATCH}",
            f"rollout.n={SAMPLES}",
            "trainer.total_training_steps=3",
            "trainer.actor.optim.lr=0.001",
            "trainer.threads=1",
        ]
        settings = load_settings(None, [*small, *overrides], {})
        if not players:
            players.append(rollout(redis_server, settings.run.id))
            players[0].start()
        questions = read_questions(settings.data.train_paths), read_questions(settings.data.val_files)
        streams = StreamClient(settings.redis, settings.run.id, payloads=Payloads(settings))
        TrainingLoop(settings, streams, PolicyWorker(settings), *questions, 0, Stop(), Health()).run()
        return settings

    yield run
    for player in players:
        player.end()


def read_metrics(settings: Settings) -> list[dict[str, object]]:
    result = read_lines(settings.run.folder / "metrics.jsonl")
    assert [line["step"] for line in result] == list(range(1, settings.trainer.total_training_steps + 1))
    return result
