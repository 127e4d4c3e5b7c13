"""Input that is wrong ends the process at once: exit code 2, one sentence with the thing and the remedy."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer_parts import write_model, write_questions


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    write_model(folder / "model")
    write_questions(folder / "train.parquet", 4)
    return folder


@pytest.fixture
def start(
    parts: Path, tmp_path: Path, free_address: Callable[[], str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        settings = [
            f"run.dir={tmp_path / 'runs'}",
            f"model.path={parts / 'model'}",
            f"data.train_files=[{parts / 'train.parquet'}]",
            f"data.val_files=[{parts / 'train.parquet'}]",
            "data.train_batch_size=2",
            "trainer.actor.ppo_mini_batch_size=2",
            "trainer.critic.ppo_mini_batch_size=2",
            "trainer.algorithm.adv_estimator=gae",
            f"trainer.health_address={free_address()}",
            *overrides,
        ]
        command = [sys.executable, "-m", "forage_trainer", *settings]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=/nowhere/model", ["model.path /nowhere/model does not exist", "Hugging Face folder"]),
        ("model.path={parts}", ["has no readable config.json", "Hugging Face folder"]),
        ("data.train_files=[/nowhere/a.parquet]", ["/nowhere/a.parquet does not exist", "Parquet"]),
        ("data.val_files=[{parts}/model/config.json]", ["config.json cannot be read as Parquet"]),
        ("data.train_batch_size=6", ["4 usable questions", "train_batch_size = 6"]),
        ("data.train_batch_size=3", ["ppo_mini_batch_size = 2 must divide", "train_batch_size = 3"]),
        ("rollout.n=1 trainer.algorithm.adv_estimator=grpo", ["rollout.n must be at least 2", "grpo compares"]),
        ("rollout.engine.max_lora_rank=8", ["trainer.lora.lora_rank = 0", "adapters of rank 1 to 8 alone"]),
        ("trainer.critic.ppo_mini_batch_size=3", ["trainer.critic.ppo_mini_batch_size = 3 must divide"]),
        ("trainer.critic.path=/nowhere", ["trainer.critic.path /nowhere has no config.json"]),
        ("trainer.total_steps=3", ["unknown setting 'trainer.total_steps'"]),
    ],
)
def test_wrong_input_is_named(
    start: Callable[..., subprocess.CompletedProcess[str]], parts: Path, tmp_path: Path, override: str, words: list[str]
) -> None:
    ended = start(*override.format(parts=parts).split())
    assert ended.returncode == 2, ended.stderr
    sentence = ended.stderr.strip().splitlines()[-1]
    assert sentence.startswith("forage trainer: ")
    for word in words:
        assert word in sentence
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_is_named(start: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        ended = start(f"trainer.health_address={address}")
    assert ended.returncode == 2
    assert f"cannot listen on {address}" in ended.stderr
