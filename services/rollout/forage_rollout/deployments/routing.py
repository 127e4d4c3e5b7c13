"""Ray Serve's router for engine replicas: `affinity.order_replicas`, replicas out of service last."""

from __future__ import annotations

import asyncio

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from forage_rollout.links.affinity import order_replicas

OUT_OF_SERVICE = "out_of_service"
"""Routing statistic that a replica reports: why it refuses to generate; empty while it serves."""


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Routes a call by its handle's `session_id`, which is the affinity of its group.

    Replicas out of service come last: where there are no others, their refusal tells the caller the reason.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they are tried, one a rank. Serve calls this by its name."""
        await asyncio.sleep(0)  # requests routed before are sent now, and count as load
        name = ""
        if pending_request is not None:
            name = pending_request.metadata.session_id
            # Without it Serve retries in a busy loop when no replica takes the request.
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        loads = {key: lengths.get(replica.replica_id) or 0 for key, replica in replicas.items()}
        order = order_replicas(name, loads)
        order.sort(key=lambda key: bool(replicas[key].routing_stats.get(OUT_OF_SERVICE)))
        return [[replicas[key]] for key in order]
