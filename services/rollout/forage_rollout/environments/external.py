"""`external`: an agent outside the service talks to the policy; see `forage_rollout.sessions`."""

from __future__ import annotations

from forage_rollout.environments.single_turn import EOS, SingleTurn
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.settings import RolloutSettings

NOT_DRAINED = "its sessions cannot begin again for a new policy: set rollout.weights.update to in_flight"


class External(SingleTurn):
    """Generations follow what a worker sends; the last one answers, in a block or as a whole.

    Attributes:
        max_requests: most generations of a session.
    """

    def __init__(self, settings: RolloutSettings, retriever: RetrieverClient, max_requests: int = 64) -> None:
        if not isinstance(max_requests, int) or max_requests < 1:
            raise ValueError(f"params.max_requests is {max_requests!r}: expected at least 1")
        super().__init__(settings, retriever, EOS)
        self.max_requests = max_requests
