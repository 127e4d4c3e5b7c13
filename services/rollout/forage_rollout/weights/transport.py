"""What every way for weights to travel has in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from forage_common.v1.trajectory_pb2 import Policy


@dataclass(frozen=True)
class Shipment:
    """A policy that may be loaded, as vLLM's workers are told of it.

    Attributes:
        init_info: what workers and sender agree on beforehand; agreed on again whenever it changes.
        update_info: where this policy's tensors come from.
    """

    update_info: dict[str, Any]
    init_info: dict[str, Any] = field(default_factory=dict)


class Transport(Protocol):
    """Makes a published policy ready to be loaded; generation runs on meanwhile."""

    @property
    def backend(self) -> str:
        """vLLM's name of the weight-transfer engine that loads what this transport ships."""
        ...

    async def prepare(self, policy: Policy) -> Shipment:
        """Fetch and verify.

        Raises:
            PolicyError: the policy must not be served.
        """
        ...
