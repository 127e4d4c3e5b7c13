"""PPO by two trainer processes, under torchrun and on two nodes of Ray, takes the steps that one process takes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
import ray_cluster
from reward_routes import serve_routes
from safetensors.numpy import load_file
from trainer_parts import ScriptedRollout, read_lines, write_model, write_questions
from waiting import WAIT_S, wait_until

from forage_queue.streams.client import StreamClient
from forage_runtime.settings import RedisSettings

LR, CRITIC_LR = 1e-6, 1e-5
METRICS = ("loss", "grad_norm", "critic/vf_loss", "critic/grad_norm", "entropy", "reward_mean")
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def build_environment() -> dict[str, str]:
    """Build the environment without the variables that engines of earlier tests in this process have set."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


@pytest.fixture
def ray_address(repository: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a cluster of two nodes, each with a CPU."""
    folder = tempfile.mkdtemp(prefix="forage-")  # sockets live in there, and their paths must stay below 108 bytes
    environment = build_environment() | ray_cluster.ENVIRONMENT | {"RAY_TMPDIR": folder}
    command = [sys.executable, str(repository / "tests/support/ray_cluster.py")]
    with (tmp_path / "ray.log").open("wb") as errors:
        cluster = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert cluster.stdout is not None
    address = cluster.stdout.readline().strip()
    assert address, (tmp_path / "ray.log").read_text()
    family = psutil.Process(cluster.pid).children(recursive=True)
    yield address
    family += psutil.Process(cluster.pid).children(recursive=True)
    cluster.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=60)
    for process in alive:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def rewards(free_address: Callable[[], str]) -> Iterator[str]:
    """Address of a reward service."""
    address = free_address()
    with serve_routes(address, "world_facts"):
        yield address


def test_ppo_in_two_processes_equals_one_process(
    tmp_path: Path, redis_server: RedisSettings, free_address: Callable[[], str], rewards: str, ray_address: str
) -> None:
    """Begun under torchrun, continued on Ray, where a rank is killed, then under torchrun, and ended by one process."""
    write_model(tmp_path / "model")
    write_questions(tmp_path / "train.parquet", 10)
    write_questions(tmp_path / "test.parquet", 2, split="test")
    log = tmp_path / "trainer.log"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    on_ray = ["trainer.nnodes=2", f"trainer.ray.address={ray_address}"]

    def start(run_id: str, steps: int, launch: Sequence[str] = (), settings: Sequence[str] = ()) -> Popen[bytes]:
        if launch:
            launch = [*launch, "--master-port", free_address().rpartition(":")[2]]
        settings = [
            *settings,
            f"run.dir={tmp_path / 'runs'}",
            f"run.id={run_id}",
            f"redis.url={redis_server.url}",
            f"model.path={tmp_path / 'model'}",
            f"data.train_files=[{tmp_path / 'train.parquet'}]",
            f"data.val_files=[{tmp_path / 'test.parquet'}]",
            "data.train_batch_size=3",
            "rollout.n=3",
            f"reward.grpc_address={rewards}",
            f"trainer.health_address={free_address()}",
            f"trainer.total_training_steps={steps}",
            "trainer.algorithm.adv_estimator=gae",
            "trainer.actor.ppo_mini_batch_size=3",
            f"trainer.actor.optim.lr={LR}",
            "trainer.save_freq=1",
            f"trainer.critic.optim.lr={CRITIC_LR}",
            "trainer.val_before_train=false",
            "trainer.threads=1",
            "run.seed=5",
        ]
        command = [sys.executable, *launch, "-m", "forage_trainer", *settings]
        quiet = ray_cluster.ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            return Popen(command, env=build_environment() | quiet, stdout=output, stderr=output)

    def wait_for_step(process: Popen[bytes], step: int) -> None:
        metrics = tmp_path / "runs/two/metrics.jsonl"

        def is_taken() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return metrics.exists() and len(read_lines(metrics)) >= step

        wait_until(is_taken, lambda: log.read_text()[-3000:], 500)

    def end(process: Popen[bytes], code: int) -> str:
        assert process.wait(300) == code, log.read_text()[-3000:]
        return log.read_text()

    players = [ScriptedRollout(redis_server, run_id) for run_id in ("one", "two")]
    for player in players:
        player.start()
    try:
        process = start("two", 100, torchrun)
        wait_for_step(process, 1)
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
        assert '"stopped"' in log.read_text()
        steps = len(read_lines(tmp_path / "runs/two/metrics.jsonl"))

        process = start("two", 100, settings=on_ray)
        wait_for_step(process, steps + 1)
        ranks = [line for line in read_events(log) if line["event"] == "rank_placed"]
        assert [(line["rank"], line["node"]) for line in ranks] == list(enumerate(ray_cluster.NODES))
        os.kill(int(str(ranks[1]["pid"])), signal.SIGKILL)
        end(process, 1)
        (failed,) = (line for line in read_events(log) if line["event"] == "rank_failed")
        assert str(failed["reason"]).startswith(f"rank 1 (pid {ranks[1]['pid']} on 127.0.0.2")
        (started,) = (line for line in read_events(log) if line["event"] == "trainer_started")
        assert started["rank"] == 0
        assert started["step"] == steps
        steps = len(read_lines(tmp_path / "runs/two/metrics.jsonl"))

        process = start("two", 100, settings=on_ray)
        wait_for_step(process, steps + 1)
        process.send_signal(signal.SIGTERM)
        end(process, 143)
        steps = len(read_lines(tmp_path / "runs/two/metrics.jsonl")) + 1

        end(start("two", steps, torchrun), 0)
        steps += 1
        end(start("two", steps), 0)
        (resumed,) = (line for line in read_events(log) if line["event"] == "resumed")
        assert (resumed["step"], resumed["processes"]) == (steps - 1, 2)
        end(start("one", steps), 0)
    finally:
        for player in players:
            player.end()

    one, two = (read_lines(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two] == list(range(1, steps + 1))
    for left, right in zip(one, two, strict=True):
        # Values differ by as much as Adam's steps do where a gradient is 0 but for rounding: see below.
        assert {n: right[n] for n in METRICS} == pytest.approx({n: left[n] for n in METRICS}, rel=1e-4, abs=1e-4)
    ledgers = [StreamClient(redis_server, name).read_ledger() for name in ("one", "two")]
    assert all(ledgers[0][step].group_uids == ledgers[1][step].group_uids for step in range(1, steps + 1))
    weights = [load_file(find_policy(tmp_path / "runs" / name, steps)) for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    # Adam moves a weight by its learning rate however small the gradient, so where that is 0 but for rounding its sign
    # decides.
    far = max(float(abs(weights[0][name] - weights[1][name]).max()) for name in weights[0])
    assert far <= 2.1 * steps * LR


def read_events(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def find_policy(run: Path, version: int) -> Path:
    """Find the newest policy of a version: a start publishes the policy of its checkpoint again."""
    return max((run / "policies").glob(f"v{version}-*/model.safetensors"), key=lambda path: path.stat().st_mtime_ns)
