"""A rank that stands still ends the others within `trainer.collective_timeout_s`, and the next start goes on."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator

import psutil
import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
import ray_cluster
from trainer_process import TrainerProcess

LIMIT_S = 20.0
TORCHRUN_KILLS_AFTER_S = 30.0
MARGIN_S = 240.0
STEPS = 200


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """Processes that are killed after the test."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        for one in (*_list_children(process), process):
            if one.is_running():
                one.kill()


def _list_children(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True) if process.is_running() else []


@pytest.mark.parametrize(("launcher", "stopped_rank"), [("torchrun", 0), ("ray", 1)])
def test_a_stopped_rank_ends_the_others_and_the_run_goes_on(
    trainer: Callable[..., TrainerProcess],
    free_address: Callable[[], str],
    family: list[psutil.Process],
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    stopped_rank: int,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)  # of an engine of an earlier test in this process
    for name, value in (ray_cluster.ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"}).items():
        monkeypatch.setenv(name, value)
    settings = [f"trainer.collective_timeout_s={LIMIT_S}", "trainer.val_before_train=false"]
    if launcher == "ray":
        settings += ["trainer.n_gpus_per_node=2"]

    def start(steps: int) -> subprocess.Popen[bytes]:
        run = trainer("stopped", steps, *settings)
        if launcher == "ray":
            process = run.start()
        else:
            port = free_address().rpartition(":")[2]
            launch = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
            process = run.start("-m", "torch.distributed.run", *launch, "-m", "forage_trainer")
        family.append(psutil.Process(process.pid))
        return process

    run = trainer("stopped", STEPS, *settings)
    process = start(STEPS)
    run.wait_for_step(process, 2)
    rank = find_ranks(process.pid, run)[stopped_rank]
    rank.suspend()
    assert process.wait(LIMIT_S + TORCHRUN_KILLS_AFTER_S + MARGIN_S) == 1, run.log[-3000:]
    reason = rf"rank {1 - stopped_rank} waited for .* {LIMIT_S:g} s: rank {stopped_rank} \(process {rank.pid}\) is stop"
    assert re.search(reason, run.log), run.log[-3000:]
    assert not rank.is_running(), "the stopped rank is gone"
    steps = len(run.metrics)

    assert start(steps + 2).wait(500) == 0, run.log[-3000:]
    assert [line["step"] for line in run.metrics] == list(range(1, steps + 3))
    assert all(len(uids) == len(set(uids)) == 3 for uids in run.consumed.values())
    assert sorted(run.consumed) == list(range(1, steps + 3))


def find_ranks(launcher: int, run: TrainerProcess) -> list[psutil.Process]:
    """Find the processes of the ranks, by rank."""
    placed = [json.loads(line) for line in run.log.splitlines() if '"rank_placed"' in line and line.startswith("{")]
    if placed:
        return [psutil.Process(line["pid"]) for line in sorted(placed, key=lambda line: line["rank"])]
    children = [child for child in psutil.Process(launcher).children() if "RANK" in child.environ()]
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))
