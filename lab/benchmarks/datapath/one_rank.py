"""One rank of one way: `one_rank.py {before|now} GROUPS SAMPLES TOKENS FOLDER`, in the environment of torchrun.

Prints one line of JSON: seconds and CPU seconds of each phase, and the peak of memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import before
import made
import torch
import torch.distributed as dist

import forage_trainer.engine.verl_cpu  # noqa: F401  (makes a CPU verl's platform)
from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import TrajectoryGroup
from forage_queue.streams.client import Entry
from forage_queue.trainer.batcher import Batch
from forage_queue.trainer.decoder import GroupDecoder
from forage_queue.trainer.replay_groups import ReplayGroups
from forage_runtime.retries import DiskRetry
from forage_runtime.settings import AlgorithmSettings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.data.digests import digest_tokens
from forage_trainer.data.rows import build_share
from forage_trainer.data.tensors import Rows, build_step_tensors, select_trajectories
from forage_trainer.engine.spmd import Processes, collective, follow
from forage_trainer.engine.verl_worker import collect, hand_out
from forage_trainer.reporting.metrics import compute_trajectory_metrics
from forage_trajectory.codec import decode_group
from forage_trajectory.trajectory import Group

VALUES = ("advantages", "reference", "old")
_CLAIMED = 64


class Clock:
    """Seconds of phases, on the clock and of this process's processors."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        dist.barrier()  # the slowest rank counts
        self.seconds[phase] = time.perf_counter() - wall, time.process_time() - cpu


class Reader:
    """What ranks do with a step's rows, without a model."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.clock = Clock()

    @collective
    def read(self, batch: Rows) -> None:
        """Build the engine's input of every rank's rows."""
        self.input = build_share(batch, range(len(batch)), self.processes.rank, self.processes.size)

    @collective
    def update(self, batch: Rows, advantages: torch.Tensor, reference: torch.Tensor, old: torch.Tensor) -> None:
        """Give every rank the values of its rows."""
        given = dict(zip(VALUES, (advantages, reference, old), strict=True))
        self.own = hand_out(self.processes, batch, [range(len(batch))], given)

    @collective
    def answer(self, batch: Rows) -> torch.Tensor:
        """Collect a value of each token of the response from every rank."""
        padded = torch.nested.to_padded_tensor(self.input["rollout_log_probs"], padding=0.0)
        return collect(self.processes, batch, [(self.input["row"], padded)])

    @collective
    def meet(self) -> None:
        """Wait for all."""
        dist.barrier()


def run_now(processes: Processes, packed: list[bytes], folder: Path) -> dict[str, Any]:
    reader = Reader(processes)
    if processes.rank:
        follow(reader)
        return {}
    seconds: dict[str, tuple[float, float]] = {}

    @contextmanager
    def clock(phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        reader.meet()
        seconds[phase] = time.perf_counter() - wall, time.process_time() - cpu

    decoder = GroupDecoder(DiskRetry(Stop(), Health()))
    decoder.folder = processes.columns if processes.size > 1 else None
    groups: list[Group] = []
    with clock("ahead"):
        while packed:  # as they are claimed, and not kept twice
            claimed, packed[:_CLAIMED] = packed[:_CLAIMED], []
            groups += decoder([PackedGroup.FromString(one) for one in claimed])  # type: ignore[arg-type]
    algorithm = AlgorithmSettings()
    with clock("figures"):
        compute_trajectory_metrics(groups, 0)
        digest_tokens(groups)
    with clock("build"):
        tensors = build_step_tensors(select_trajectories(groups, algorithm), 0, 1, 0, algorithm)
    assert tensors is not None
    with clock("read"):
        reader.read(tensors)
    with clock("values"):
        reader.update(tensors, *(torch.ones(tensors.shape) for _ in VALUES))
    with clock("results"):
        reader.answer(tensors)
    with clock("keep"):
        ReplayGroups(folder).write(Batch(1, tuple(Entry(b"1-0", group) for group in groups), 0))
    processes.close()
    return {"seconds": seconds}


def run_before(rank: int, size: int, plain: list[bytes], folder: Path) -> dict[str, Any]:
    clock = Clock()
    groups: list[TrajectoryGroup] = []
    everything: dict[str, torch.Tensor] = {}
    with clock("ahead"):
        while plain:
            claimed, plain[:_CLAIMED] = plain[:_CLAIMED], []
            groups += map(TrajectoryGroup.FromString, claimed)
    with clock("figures"):
        before.describe(groups)
    with clock("build"):
        if rank == 0:
            everything, matrices = before.build(groups)
    with clock("read"):
        everything = before.broadcast(everything, rank)
        share = before.select_share(everything, rank, size)
    with clock("values"):
        for _ in VALUES:
            dist.broadcast(torch.ones(everything["mask"].shape), src=0)
    with clock("results"):
        dist.all_reduce(torch.ones(everything["mask"].shape))
    with clock("keep"):
        if rank == 0:
            before.keep(groups, folder / "step_1")
    assert share
    return {"seconds": clock.seconds, "held": len(matrices) if rank == 0 else 0}


def warm_up() -> None:
    """Build a small input: the first jagged tensor of a process imports PyTorch's compiler, which takes seconds."""
    algorithm = AlgorithmSettings()
    groups = [decode_group(PackedGroup.FromString(one)) for one in made.make_groups(1, 2, 1000)[1]]
    tensors = build_step_tensors(select_trajectories(groups, algorithm), 0, 1, 0, algorithm)
    assert tensors is not None
    torch.nested.to_padded_tensor(build_share(tensors, [0, 1], 0, 1)["rollout_log_probs"], padding=0.0)


def main(way: str, groups: int, samples: int, tokens: int, folder: Path) -> None:
    processes = Processes.join(600, folder / "columns")
    rank = processes.rank
    warm_up()
    plain, packed = made.make_groups(groups, samples, tokens) if rank == 0 else ([], [])
    sizes = {"plain_bytes": sum(map(len, plain)), "packed_bytes": sum(map(len, packed))}
    (packed if way == "before" else plain).clear()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins here
    before_gib, cpu = read_memory("VmRSS"), time.process_time()
    result = run_before(rank, processes.size, plain, folder) if way == "before" else run_now(processes, packed, folder)
    usage = {"peak_gib": read_memory("VmHWM"), "base_gib": before_gib, "cpu_s": time.process_time() - cpu}
    print(json.dumps({"rank": rank, **result, **usage, **sizes}), flush=True)


def read_memory(name: str) -> float:
    """Read a figure of /proc/self/status, in GiB."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 2**20
    raise LookupError(name)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
