"""Memory of one GPU or machine, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from forage_cli.planning.assumptions import GIB


@dataclass(frozen=True)
class MemoryUse:
    """One use of memory, in bytes, and in words what its size follows from."""

    name: str
    size: int
    why: str


@dataclass(frozen=True)
class Memory:
    """What one GPU holds at the moment at which it holds most.

    Attributes:
        of: rollout or trainer.
        gpus: number of GPUs that hold the same.
        moment: at which.
        limit: bytes of the GPU.
    """

    of: str
    gpus: int
    moment: str
    parts: tuple[MemoryUse, ...]
    limit: int

    @property
    def total(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def format_seconds(seconds: float) -> str:
    """Seconds for a reader: "183 s", "1.5 s"."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def format_gib(size: float) -> str:
    """Bytes for a reader: "12.3 GiB"."""
    return f"{size / GIB:.1f} GiB"
