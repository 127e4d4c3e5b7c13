"""What the loop asks of an engine and what it gets back: plain data, so that it crosses processes cheaply."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from forage_common.v1.trajectory_pb2 import Sampling


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        token_ids: the whole context.
        max_tokens: at most so many are sampled.
        seed: of this generation alone; None = unseeded.
        stop: texts that end it and stay part of it.
        min_tokens: until so many are sampled nothing but `max_tokens` ends it.
        affinity: requests of one name go to one replica, whose prefix cache knows them.
    """

    token_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    affinity: str = ""


@dataclass(frozen=True)
class Generation:
    """Sampled tokens and where they came from.

    Attributes:
        token_ids: as sampled, the stop token or end-of-sequence token included.
        logprobs: natural logarithms, one a token, of the distribution that was sampled from.
        hit_length: `max_tokens` ended it.
        versions: (policy version, epoch, begin, end) over `token_ids`, in order, without gaps.
    """

    token_ids: list[int]
    logprobs: list[float]
    hit_length: bool
    versions: list[tuple[int, int, int, int]]


class Engine(Protocol):
    """Where tokens are sampled."""

    async def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn.

        Raises:
            ValueError: the chat template refuses the messages.
        """
        ...

    async def generate(self, request: Request) -> Generation: ...

    async def release(self, affinity: str) -> None:
        """Nothing more will be asked for under this name."""
        ...


def request(
    sampling: Sampling,
    context: list[int],
    max_tokens: int,
    sample: int,
    turn: int,
    stop: tuple[str, ...] = (),
    min_tokens: int = 0,
    affinity: str = "",
) -> Request:
    """The request of one turn: `seed + sample`, mixed with the turn so that turns differ and can be repeated."""
    seed = None
    if sampling.seed:
        digest = hashlib.blake2b(f"{sampling.seed + sample}/{turn}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 2
    top_p, top_k = sampling.top_p or 1.0, sampling.top_k or -1
    return Request(
        context, max_tokens, sampling.temperature, top_p, top_k, seed, stop, min(min_tokens, max_tokens), affinity
    )
