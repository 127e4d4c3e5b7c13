"""Ray Serve's router for engine replicas: `affinity.preferred`, over those that serve."""

from __future__ import annotations

import asyncio

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from forage_rollout.deployments.affinity import preferred

# Routing statistics that a replica reports: why it refuses to generate, empty while it serves.
OUT_OF_SERVICE = "out_of_service"


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Routes a call by its handle's `session_id`, which is the affinity of its group.

    Replicas that are out of service come last: where there are no others their refusal tells the caller why.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they are tried, one a rank."""
        await asyncio.sleep(0)  # whoever was routed before is sent now, and counts as load
        name = ""
        if pending_request is not None:
            name = pending_request.metadata.session_id
            # Without it Serve asks again at once, for ever, when no replica takes the request.
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        loads = {key: lengths.get(replica.replica_id) or 0 for key, replica in replicas.items()}
        order = preferred(name, loads)
        order.sort(key=lambda key: bool(replicas[key].routing_stats.get(OUT_OF_SERVICE)))
        return [[replicas[key]] for key in order]
