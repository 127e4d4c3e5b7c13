"""The interface of weight transports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from forage_common.v1.trajectory_pb2 import Policy


@dataclass(frozen=True)
class TransferInfo:
    """A verified policy as vLLM's weight transfer takes it.

    Attributes:
        update_info: where this policy's tensors come from.
        init_info: how workers and sender connect; they connect again when it changes.
    """

    update_info: dict[str, Any]
    init_info: dict[str, Any] = field(default_factory=dict)


class Transport(Protocol):
    """Prepares a published policy to be loaded; generation goes on meanwhile."""

    @property
    def backend(self) -> str:
        """vLLM's name of the weight-transfer engine that loads the policies of this transport."""
        ...

    async def prepare(self, policy: Policy) -> TransferInfo:
        """Fetch and verify a policy.

        Raises:
            PolicyError: the policy must not be served.
        """
        ...
