"""Requests to an engine and the generations it returns: plain data, cheap to send between processes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from forage_proto.v1.trajectory_pb2 import Sampling, TemplateValues
from forage_runtime.text.chat_template import Chat


@dataclass(frozen=True)
class GenerationRequest:
    """One generation.

    Attributes:
        token_ids: the whole context.
        max_tokens: upper limit of sampled tokens.
        seed: of this generation alone; None = unseeded.
        stop: texts that end the generation and stay part of it.
        min_tokens: before so many tokens nothing ends the generation but `max_tokens`.
        affinity: requests with the same affinity go to one replica, whose prefix cache holds their context.
        priority: the lowest is sampled first where `rollout.engine.args.scheduling_policy` is priority, see
            `rank_generation`.
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
    priority: int = 0


@dataclass(frozen=True)
class Generation:
    """Sampled tokens and the policies that sampled them.

    Attributes:
        token_ids: as sampled, with the stop token or end-of-sequence token.
        logprobs: natural logarithms, one a token, of the distribution that was sampled from.
        hit_length: `max_tokens` ended the generation.
        versions: (policy version, epoch, begin, end) over `token_ids`, in order, without gaps.
    """

    token_ids: list[int]
    logprobs: list[float]
    hit_length: bool
    versions: list[tuple[int, int, int, int]]


class RenderedPrompt(NamedTuple):
    """A prompt as token ids, and the end of its text that the template wrote in the policy's name."""

    token_ids: list[int]
    opening: str = ""


class Engine(Protocol):
    """Samples tokens."""

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        """Render a chat, ready for the assistant's turn.

        Args:
            values: what the chat template gets besides the messages.

        Raises:
            ValueError: the chat template rejects the messages.
        """
        ...

    async def generate(self, request: GenerationRequest) -> Generation: ...

    async def release(self, affinity: str) -> None:
        """End an affinity: no more requests of it will come."""
        ...


def build_request(
    sampling: Sampling,
    context: list[int],
    max_tokens: int,
    sample: int,
    turn: int,
    stop: tuple[str, ...] = (),
    min_tokens: int = 0,
    affinity: str = "",
    priority: int = 0,
) -> GenerationRequest:
    """The request of one turn.

    Its seed is a hash of `seed + sample` and the turn, so that turns differ and each can be repeated alone.
    """
    seed = None
    if sampling.seed:
        digest = hashlib.blake2b(f"{sampling.seed + sample}/{turn}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 2
    top_p, top_k = sampling.top_p or 1.0, sampling.top_k or -1
    return GenerationRequest(
        token_ids=context,
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        min_tokens=min(min_tokens, max_tokens),
        affinity=affinity,
        priority=priority,
    )


def rank_generation(context_tokens: int, ended: int, samples: int, longest: int) -> int:
    """The priority of a generation: the longest contexts come first, and those of groups that are nearly finished.

    A batch ends with its last trajectory, and that is one with many turns. Samples of a group that have ended count as
    their share of the longest context. No rank is below 0, which those have for whom somebody waits: users' questions
    and requests to the OpenAI-compatible endpoints.

    Args:
        ended: samples of the group that are finished.
        longest: tokens that a context may have.
    """
    return max(0, 2 * longest - context_tokens - longest * ended // max(1, samples))
