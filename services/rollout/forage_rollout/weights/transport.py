"""What the weight transports (`filesystem`, `nccl`) prepare for vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TransferInfo:
    """A verified policy as vLLM's weight transfer takes it.

    Attributes:
        update_info: where this policy's tensors come from.
        init_info: how workers and sender connect; they connect again when it changes.
    """

    update_info: dict[str, Any]
    init_info: dict[str, Any] = field(default_factory=dict)
