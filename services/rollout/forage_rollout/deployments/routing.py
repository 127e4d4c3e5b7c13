"""Ray Serve's routers; that of engine replicas also tells this process where each listens for agents.

Agents send generations on connections of their own (`links`). Through Serve go the rest: broadcasts, and requests to
the OpenAI-compatible endpoints.

Serve copies this module, whatever it holds, to each process that routes: so it holds nothing that others look at.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from forage_rollout.links.affinity import order_replicas
from forage_rollout.links.engine_directory import update_directory

OUT_OF_SERVICE = "out_of_service"
"""Routing statistic that a replica reports: why it refuses to generate; empty while it serves."""
CHAT = "chat"
"""Argument of a call: the name of a chat, whose turns go to one replica while its load allows it."""
REPLICA = "replica"
"""Argument of a call: the name of the agent's replica that has a session."""


class _LoadRouter(RequestRouter):  # type: ignore[misc]
    """Orders replicas by their requests in progress, and by the name in an argument of the call.

    Attributes:
        argument: the argument; a call without it has no name.
    """

    argument: ClassVar[str]

    @abstractmethod
    def order(self, name: str, loads: Mapping[str, int], replicas: Mapping[str, RunningReplica]) -> list[str]:
        """The replicas in the order in which they are tried.

        Args:
            name: in the call's argument; empty: it has none.
            loads: replica → requests in progress.
        """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they are tried, one a rank. Serve calls this by its name."""
        await asyncio.sleep(0)  # requests routed before are sent now, and count as load
        name = ""
        if pending_request is not None:
            name = pending_request.kwargs.get(self.argument, "")
            # Without it Serve retries in a busy loop when no replica takes the request.
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        loads = {key: lengths.get(replica.replica_id) or 0 for key, replica in replicas.items()}
        return [[replicas[key]] for key in self.order(name, loads, replicas)]


class EngineRouter(_LoadRouter):
    """Prefers the replica with the fewest requests, for a named chat its own; those out of service come last.

    Where there are no others, their refusal tells the caller the reason.
    """

    argument = CHAT

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the running replicas. Serve calls this by its name, at each change."""
        super().update_replicas(replicas)
        update_directory({replica.replica_id.unique_id: replica.replica_metadata for replica in replicas})

    def order(self, name: str, loads: Mapping[str, int], replicas: Mapping[str, RunningReplica]) -> list[str]:
        order = order_replicas(name, loads)
        return sorted(order, key=lambda key: bool(replicas[key].routing_stats.get(OUT_OF_SERVICE)))


class AgentRouter(_LoadRouter):
    """Prefers the replica with the fewest requests; requests of a session go to the replica that has it.

    Where that has gone, another one says so.
    """

    argument = REPLICA

    def order(self, name: str, loads: Mapping[str, int], replicas: Mapping[str, RunningReplica]) -> list[str]:
        return [name] if name in replicas else order_replicas("", loads)
