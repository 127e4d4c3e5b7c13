"""Ray Serve's router for engine replicas, and what it learns of them: where each listens for agents.

Agents send generations on connections of their own (`links`). Through Serve go the rest: broadcasts, and requests to
the OpenAI-compatible endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from forage_rollout.links.affinity import order_replicas
from forage_rollout.links.link import Door

OUT_OF_SERVICE = "out_of_service"
"""Routing statistic that a replica reports: why it refuses to generate; empty while it serves."""
_ADDRESS, _KEY = "link_address", "link_key"
OnDoors = Callable[[Mapping[str, Door]], None]


def describe_door(door: Door) -> dict[str, str]:
    """What a replica reports of itself once; Serve's controller tells it every router, on Ray's own wires."""
    return {_ADDRESS: door.address, _KEY: door.key.hex()}


class _Doors:
    """The doors of the running replicas, as the router of this process has them."""

    def __init__(self) -> None:
        self._doors: dict[str, Door] = {}
        self._on_change: OnDoors | None = None

    def watch(self, on_change: OnDoors) -> None:
        """Call back now and at each change, in the event loop that runs now: the router may have another one."""
        loop = asyncio.get_running_loop()

        def call_back(doors: Mapping[str, Door]) -> None:
            loop.call_soon_threadsafe(on_change, doors)

        self._on_change = call_back
        call_back(self._doors)

    def update(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the replicas: name → what it reports of itself."""
        doors = {
            name: Door(str(about[_ADDRESS]), bytes.fromhex(about[_KEY]))
            for name, about in replicas.items()
            if _ADDRESS in about
        }
        if doors != self._doors:
            self._doors = doors
            if self._on_change is not None:
                self._on_change(doors)


ENGINE_DOORS = _Doors()
"""Kept by the router of the handle of engines; a process has one at most."""


class EngineRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica with the fewest requests; those out of service come last.

    Where there are no others, their refusal tells the caller the reason.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the running replicas. Serve calls this by its name, at each change."""
        super().update_replicas(replicas)
        ENGINE_DOORS.update({replica.replica_id.unique_id: replica.replica_metadata for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they are tried, one a rank. Serve calls this by its name."""
        await asyncio.sleep(0)  # requests routed before are sent now, and count as load
        if pending_request is not None:
            # Without it Serve retries in a busy loop when no replica takes the request.
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        loads = {key: lengths.get(replica.replica_id) or 0 for key, replica in replicas.items()}
        order = order_replicas("", loads)
        order.sort(key=lambda key: bool(replicas[key].routing_stats.get(OUT_OF_SERVICE)))
        return [[replicas[key]] for key in order]
