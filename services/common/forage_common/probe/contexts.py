"""What the policy is shown in a probe: token ids that it has sampled or seen, and the connective after them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from forage_common.errors import DataError
from forage_common.probe.cot import find_cot
from forage_common.settings import RolloutSettings
from forage_common.text.token_texts import TokenTexts
from forage_common.v1.probe_pb2 import CotBoundary
from forage_common.v1.trajectory_pb2 import ActionKind, Role, Span, Status, Trajectory

CONNECTIVE = " </think> Thus, the final answer is <answer> "
_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Thought:
    """The chain of thought of one turn: tokens [begin, end) of prompt + response.

    Attributes:
        window: the first token that the policy saw when it thought.
        span: the turn's place in `Trajectory.spans`.
        offset: characters of the turn before the thought.
        texts: of each token of the thought.
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
        """Tokens."""
        return self.end - self.begin


class NothingToProbeError(Exception):
    """A trajectory has no such thought; says why."""


def select_turns(trajectory: Trajectory, every: bool) -> list[int]:
    """The turns to probe, from 1: that which answered, or where none did the last one; or every turn."""
    count = sum(span.role == Role.ROLE_MODEL for span in trajectory.spans)
    if every:
        return list(range(1, count + 1))
    answering = [turn.index for turn in trajectory.turns if turn.action == ActionKind.ACTION_KIND_ANSWER]
    return answering[-1:] or ([count] if count else [])


def find_thought(trajectory: Trajectory, turn: int, texts: TokenTexts, settings: RolloutSettings) -> Thought:
    """The thought of a turn.

    Raises:
        NothingToProbeError: the trajectory failed, or has no such turn.
        DataError: `texts` are not those of the policy that sampled it.
    """
    if trajectory.status != Status.STATUS_OK:
        reason = trajectory.status_detail or "no reason is stored"
        raise NothingToProbeError(f"its status is {Status.Name(trajectory.status).removeprefix('STATUS_')}: {reason}")
    spoken = [place for place, span in enumerate(trajectory.spans) if span.role == Role.ROLE_MODEL]
    if not 1 <= turn <= len(spoken):
        raise NothingToProbeError(f"it has {len(spoken)} turns, not {turn}")
    span = trajectory.spans[spoken[turn - 1]]
    said = texts(trajectory.token_ids[span.begin : span.end])
    _check(trajectory, span, "".join(said))
    cot = find_cot(said)
    return Thought(
        turn=turn,
        begin=span.begin + cot.begin,
        end=span.begin + cot.end,
        boundary=cot.boundary,
        window=max(0, span.begin - _seen(settings)),
        span=spoken[turn - 1],
        offset=sum(map(len, said[: cot.begin])),
        texts=tuple(said[cot.begin : cot.end]),
    )


def build_context(trajectory: Trajectory, thought: Thought, kept: int, connective: Sequence[int]) -> list[int]:
    """Token ids of what preceded the thought, its first `kept` tokens, and the connective."""
    return [*trajectory.token_ids[thought.window : thought.begin + kept], *connective]


def derive_seed(base: int, trajectory_id: str, turn: int, point: int) -> int:
    """The seed of a point's first sample; the others follow it. Below 2^62, so that they fit an engine's 64 bits."""
    name = f"{base}\0{trajectory_id}\0{turn}\0{point}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 2


def _seen(settings: RolloutSettings) -> int:
    """Tokens that a turn sees of what came before it, as the loop has it."""
    return min(settings.max_prompt_length, settings.engine.max_model_len - settings.max_response_length)


def _check(trajectory: Trajectory, span: Span, said: str) -> None:
    """A span ends with its stop string, its last token may not; broken characters are not compared."""
    if _BROKEN not in span.text and not said.startswith(span.text):
        raise DataError(
            f"trajectory {trajectory.id}: model.path has another vocabulary than the policy that sampled it (it reads "
            f"{said[:40]!r}, stored is {span.text[:40]!r}): set model.path to that policy's folder"
        )
