"""Probes of many trajectories with bounded concurrency."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing

from forage_probe.contexts import select_turns
from forage_probe.prober import ProbePlan, Prober
from forage_proto.v1.probe_pb2 import Probed
from forage_proto.v1.trajectory_pb2 import Trajectory
from forage_runtime.clients.concurrency import map_concurrently
from forage_runtime.settings import Settings

Item = tuple[str, int]
"""A trajectory's id and one of its turns, from 1."""

IN_FLIGHT = 4
"""Trajectories that are probed at once: some use the engine while others are being scored."""


def list_probe_items(trajectory: Trajectory, every: bool) -> list[Item]:
    """List the probes of a trajectory; one without a generated turn has one, whose status says so."""
    return [(trajectory.id, turn) for turn in select_turns(trajectory, every) or [1]]


async def run_probes(
    trajectories: Iterable[Trajectory], wanted: Collection[Item], settings: Settings, plan: ProbePlan
) -> AsyncGenerator[Probed, None]:
    """Yield a probe of each wanted turn in order of completion; turns of a trajectory are adjacent to share prefixes.

    Raises:
        As `Prober` and its `probe`.
    """
    turns = (
        (trajectory, turn)
        for trajectory in trajectories
        for name, turn in list_probe_items(trajectory, every=True)
        if (name, turn) in wanted
    )
    async with Prober(settings, plan) as prober:

        async def run(turn: tuple[Trajectory, int]) -> Probed:
            return await prober.probe(*turn)

        async with aclosing(map_concurrently(turns, run, IN_FLIGHT)) as done:
            async for _, probed in done:
                yield probed
