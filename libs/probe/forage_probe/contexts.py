"""Contexts of a probe: token ids that the policy has sampled or seen, followed by a connective."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from forage_probe.cot import find_cot
from forage_proto.v1.probe_pb2 import CotBoundary
from forage_proto.v1.trajectory_pb2 import ActionKind, Role, Span, Status, Trajectory
from forage_runtime.errors import DataError
from forage_runtime.settings import RolloutSettings
from forage_runtime.text.enums import name_value
from forage_runtime.text.token_texts import TokenTexts

CONNECTIVE = " </think> Thus, the final answer is <answer> "
_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Thought:
    """The chain of thought of one turn: tokens [begin, end) of prompt + response.

    Attributes:
        window: the first token of the context in which the policy generated the turn.
        span: index of the turn in `Trajectory.spans`.
        offset: number of characters of the turn before the thought.
        texts: text of each token of the thought.
    """

    turn: int
    begin: int
    end: int
    boundary: CotBoundary.ValueType
    window: int
    span: int
    offset: int
    texts: tuple[str, ...]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.begin


class NothingToProbeError(Exception):
    """A trajectory has no such thought; the message has the reason."""


def select_turns(trajectory: Trajectory, every: bool) -> list[int]:
    """Select the turns to probe, from 1: every turn, or the one with the answer, or the last one if none has."""
    count = sum(span.role == Role.ROLE_MODEL for span in trajectory.spans)
    if every:
        return list(range(1, count + 1))
    answering = [turn.index for turn in trajectory.turns if turn.action == ActionKind.ACTION_KIND_ANSWER]
    return answering[-1:] or ([count] if count else [])


def find_thought(trajectory: Trajectory, turn: int, texts: TokenTexts, settings: RolloutSettings) -> Thought:
    """Find the thought of a turn.

    Raises:
        NothingToProbeError: the trajectory failed, or has no such turn.
        DataError: `texts` has another vocabulary than the policy that sampled the trajectory.
    """
    if trajectory.status != Status.STATUS_OK:
        reason = trajectory.status_detail or "no reason is stored"
        raise NothingToProbeError(f"its status is {name_value(Status, trajectory.status)}: {reason}")
    generated = [place for place, span in enumerate(trajectory.spans) if span.role == Role.ROLE_MODEL]
    if not 1 <= turn <= len(generated):
        raise NothingToProbeError(f"it has {len(generated)} turns, not {turn}")
    span = trajectory.spans[generated[turn - 1]]
    token_texts = texts(trajectory.token_ids[span.begin : span.end])
    _check_vocabulary(trajectory, span, "".join(token_texts))
    before = trajectory.spans[generated[turn - 1] - 1] if generated[turn - 1] else Span()
    # What the chat template opened is the thought's beginning, and no token of it.
    given = [before.text] if before.opening else []
    cot = find_cot([*given, *token_texts])
    begin, end = (max(0, place - len(given)) for place in (cot.begin, cot.end))
    return Thought(
        turn=turn,
        begin=span.begin + begin,
        end=span.begin + end,
        boundary=cot.boundary,
        window=max(0, span.begin - _context_length(settings)),
        span=generated[turn - 1],
        offset=sum(map(len, token_texts[:begin])),
        texts=tuple(token_texts[begin:end]),
    )


def build_context(trajectory: Trajectory, thought: Thought, kept: int, connective: Sequence[int]) -> list[int]:
    """Build the token ids of the context before the thought, its first `kept` tokens, and the connective."""
    return [*trajectory.token_ids[thought.window : thought.begin + kept], *connective]


def derive_seed(base: int, trajectory_id: str, turn: int, point: int) -> int:
    """Derive the seed of a point's first sample; the others count up from it. Below 2^62, to fit into 64 bits."""
    name = f"{base}\0{trajectory_id}\0{turn}\0{point}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 2


def _context_length(settings: RolloutSettings) -> int:
    """The number of tokens of context that a turn is generated from, as in the rollout service."""
    return min(settings.max_prompt_length, settings.engine.max_model_len - settings.max_response_length)


def _check_vocabulary(trajectory: Trajectory, span: Span, text: str) -> None:
    """Compare texts. A span ends with its stop string, its last token may not; undecodable spans are skipped."""
    if _BROKEN not in span.text and not text.startswith(span.text):
        raise DataError(
            f"trajectory {trajectory.id}: model.path has another vocabulary than the policy that sampled it (it reads "
            f"{text[:40]!r}, stored is {span.text[:40]!r}): set model.path to that policy's folder"
        )
