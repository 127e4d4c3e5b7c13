"""What a policy acts on: the action blocks that it may write, and what answers them.

An environment of your own is a subclass, in a file or a package (`rollout.environments.<data_source>`). It decides what
an action means and what the policy is shown; lengths, masks, escaping and time limits stay with the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forage_common.errors import ForageError
from forage_common.settings import RolloutSettings
from forage_common.v1.trajectory_pb2 import ActionKind, Document, Prompt, Provenance
from forage_rollout.clients import Retriever

ANSWER = "answer"


class EnvironmentFailedError(ForageError):
    """An environment raised what it may not; its trajectory keeps the sentence and stays out of loss and baseline."""


@dataclass(frozen=True)
class Action:
    """What a generation asks for.

    Attributes:
        content: the query or the answer, stripped.
        tag: of the block that holds it; empty where there is none.
    """

    kind: ActionKind.ValueType
    content: str
    tag: str = ""


INVALID = Action(ActionKind.ACTION_KIND_INVALID, "")


@dataclass(frozen=True)
class Observation:
    """What the policy is shown after an action.

    Attributes:
        body: escaped and, where it is too long, cut by the loop; `opening` and `closing` are kept whole.
        succeeded: False where the action was understood but could not be carried out, such as a malformed query.
        partial: a part of the source was missing.
    """

    body: str
    opening: str = "\n\n<information>"
    closing: str = "</information>\n\n"
    succeeded: bool = True
    documents: Sequence[Document] = ()
    provenance: Provenance = field(default_factory=Provenance)
    partial: bool = False


@dataclass(frozen=True)
class Budget:
    """How many tokens the next generation may and must have; never more than `rollout.max_response_length`."""

    max_tokens: int
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.min_tokens < 0:
            raise ValueError(f"{self}: expected max_tokens of at least 1 and min_tokens of at least 0")


@dataclass
class Episode:
    """One trajectory, as its environment sees it.

    Attributes:
        turn: of the generation that is asked for or was just made, from 1.
        hit_length: the generation just made did not end by itself.
        state: the environment's own, of this trajectory alone.
    """

    prompt: Prompt
    sample: int = 0
    turn: int = 1
    hit_length: bool = False
    state: dict[str, Any] = field(default_factory=dict)


class Environment:
    """The base of all: actions in tags, of which `<answer>` ends the trajectory.

    One instance serves every trajectory of a data source; what belongs to one trajectory is in its `Episode`.

    Attributes:
        tags: of the action blocks. A generation ends after the first closing tag, looked for in this order.
        feedback: what follows a generation without an action; may be empty.
        max_turns: with actions; one last generation without may follow.
    """

    tags: tuple[str, ...] = (ANSWER,)
    feedback: str = ""

    def __init__(self, settings: RolloutSettings, retriever: Retriever) -> None:
        """A subclass may take parameters besides: `rollout.environments.<data_source>.params`."""
        self.max_turns = settings.max_turns
        self.retriever = retriever
        self._budget = Budget(settings.max_response_length)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a generation and stay part of it."""
        return tuple(f"</{tag}>" for tag in self.tags)

    def budget(self, episode: Episode) -> Budget:
        """The length of the next generation."""
        return self._budget

    def parse(self, text: str, episode: Episode) -> Action:
        """The first complete block of a generation; none of them is an invalid action.

        Args:
            text: what was generated, without a control token at its end.
        """
        # As the pattern <(tag)>(.*?)</tag> would, but that one is quadratic on openers without closers.
        blocks = []
        for tag in self.tags:
            begin = text.find(f"<{tag}>")
            end = text.find(f"</{tag}>", begin) if begin >= 0 else -1
            if end >= 0:  # else no later opener has a closer either
                blocks.append((begin, end, tag))
        if not blocks:
            return INVALID
        begin, end, tag = min(blocks)
        kind = ActionKind.ACTION_KIND_ANSWER if tag == ANSWER else ActionKind.ACTION_KIND_SEARCH
        return Action(kind, text[begin + len(f"<{tag}>") : end].strip(), tag)

    async def respond(self, action: Action, episode: Episode) -> Observation:
        """Carry out an action that is neither an answer nor invalid, within the trajectory's deadline.

        Raises:
            UnavailableError, RefusedError, MalformedReplyError: a service failed; the trajectory keeps the status and
                stays out of loss and baseline. Anything else does the same as an internal error.
        """
        raise NotImplementedError(f"<{action.tag}> is a tag of {type(self).__name__}, which does not respond to it")

    async def close(self) -> None:
        """Let go of what the environment holds open."""
