"""PPO by two trainer processes under torchrun: steps, checkpoints and policies are those of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
from safetensors.numpy import load_file
from trainer_parts import ScriptedRollout, read_lines, write_model, write_questions

from forage_common.settings import RedisSettings
from forage_common.streams import StreamClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, LR = 8, 1e-6
FIGURES = ("loss", "grad_norm", "critic/vf_loss", "critic/grad_norm", "entropy", "reward_mean")


def test_ppo_in_two_processes(tmp_path: Path, redis_server: RedisSettings, free_address: Callable[[], str]) -> None:
    """Stopped by SIGTERM and started again; one process may not go on with their checkpoint."""
    write_model(tmp_path / "model")
    write_questions(tmp_path / "train.parquet", 10)
    write_questions(tmp_path / "test.parquet", 2, split="test")
    log = tmp_path / "trainer.log"

    def start(run_id: str, processes: int, steps: int) -> subprocess.Popen[bytes]:
        port = free_address().rpartition(":")[2]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
        launch += ["--master-addr", "127.0.0.1"]
        settings = [
            f"run.dir={tmp_path / 'runs'}",
            f"run.id={run_id}",
            f"redis.url={redis_server.url}",
            f"model.path={tmp_path / 'model'}",
            f"data.train_files=[{tmp_path / 'train.parquet'}]",
            f"data.val_files=[{tmp_path / 'test.parquet'}]",
            "data.train_batch_size=3",
            "rollout.n=3",
            f"trainer.health_address={free_address()}",
            f"trainer.total_training_steps={steps}",
            "trainer.algorithm.adv_estimator=gae",
            "trainer.actor.ppo_mini_batch_size=3",
            f"trainer.actor.optim.lr={LR}",
            "trainer.save_freq=1",
            "trainer.critic.ppo_mini_batch_size=3",
            "trainer.critic.optim.lr=0.001",
            "trainer.val_before_train=false",
            "trainer.threads=1",
            "run.seed=5",
        ]
        command = [sys.executable, *(launch if processes > 1 else ()), "-m", "forage_trainer", *settings]
        quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            return subprocess.Popen(command, env=os.environ | quiet, stdout=output, stderr=output)

    def end(process: subprocess.Popen[bytes], code: int) -> None:
        assert process.wait(200) == code, log.read_text()[-3000:]

    players = [ScriptedRollout(redis_server, run_id) for run_id in ("one", "two")]
    for player in players:
        player.start()
    try:
        stopped = start("two", 2, 100)
        metrics = tmp_path / "runs/two/metrics.jsonl"
        deadline = time.monotonic() + 150
        while not (metrics.exists() and read_lines(metrics)):
            assert stopped.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stopped.send_signal(signal.SIGTERM)
        stopped.wait(25)
        assert '"stopped"' in log.read_text()
        assert len(read_lines(metrics)) < STEPS
        end(start("two", 2, STEPS), 0)
        end(start("one", 1, STEPS), 0)
        end(start("two", 1, STEPS + 1), 2)
        assert "was written by 2 trainer processes" in log.read_text()
    finally:
        for player in players:
            player.end()

    one, two = (read_lines(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two] == list(range(1, STEPS + 1))
    for left, right in zip(one, two, strict=True):
        assert {n: right[n] for n in FIGURES} == pytest.approx({n: left[n] for n in FIGURES}, abs=1e-4)
    ledgers = [StreamClient(redis_server, name).ledger() for name in ("one", "two")]
    assert all(ledgers[0][step].group_uids == ledgers[1][step].group_uids for step in range(1, STEPS + 1))
    weights = [load_file(policy(tmp_path / "runs" / name, STEPS)) for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    # Adam moves a weight by its learning rate however small the gradient, so where that is 0 but for rounding its sign
    # decides.
    far = max(float(abs(weights[0][name] - weights[1][name]).max()) for name in weights[0])
    assert far <= 2.1 * STEPS * LR


def policy(run: Path, version: int) -> Path:
    (found,) = (run / "policies").glob(f"v{version}-*/model.safetensors")
    return found
