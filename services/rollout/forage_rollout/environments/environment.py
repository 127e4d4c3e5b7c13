"""The base of environments: the action blocks that a policy may write, and the observations that answer them.

Your own environment is a subclass, in a file or a package (`rollout.environments.<data_source>`). It decides what an
action means and what the policy observes; lengths, masks, escaping and time limits stay with the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forage_proto.v1.trajectory_pb2 import ActionKind, Document, Prompt, Provenance
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import ForageError
from forage_runtime.settings import RolloutSettings

ANSWER = "answer"


class EnvironmentFailedError(ForageError):
    """An environment's own code failed; its trajectory keeps the message and stays out of loss and baseline.

    Args:
        stack: where, if it was in another process.
    """

    def __init__(self, message: str, stack: str = "") -> None:
        super().__init__(message)
        self.stack = stack


@dataclass(frozen=True)
class Action:
    """The action that a generation asks for.

    Attributes:
        content: the query or the answer, stripped.
        tag: of the block that holds it; empty where there is no block.
    """

    kind: ActionKind.ValueType
    content: str
    tag: str = ""


INVALID = Action(ActionKind.ACTION_KIND_INVALID, "")


@dataclass(frozen=True)
class Observation:
    """The text that the policy observes after an action.

    Attributes:
        body: the loop escapes it and cuts it where it is too long; `opening` and `closing` are kept whole.
        succeeded: False where the action was valid but could not be carried out, such as a malformed query.
        partial: part of the source was unavailable.
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
    """Largest and smallest number of tokens of the next generation, within `rollout.max_response_length`."""

    max_tokens: int
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.min_tokens < 0:
            raise ValueError(f"{self}: expected max_tokens of at least 1 and min_tokens of at least 0")


@dataclass
class Episode:
    """One trajectory, as its environment sees it.

    Attributes:
        turn: number of the next or latest generation, from 1.
        hit_length: the latest generation was ended by its length.
        state: belongs to the environment, for this trajectory alone.
    """

    prompt: Prompt
    sample: int = 0
    turn: int = 1
    hit_length: bool = False
    state: dict[str, Any] = field(default_factory=dict)


class Environment:
    """The base class: actions are blocks in tags, and `<answer>` ends the trajectory.

    One instance serves every trajectory of a data source; the state of one trajectory is in its `Episode`.

    Attributes:
        tags: of the action blocks. A generation ends after the first closing tag, searched in this order.
        feedback: appended after a generation without a valid action; may be empty.
        max_turns: turns whose action is carried out; one last generation may follow.
    """

    tags: tuple[str, ...] = (ANSWER,)
    feedback: str = ""

    def __init__(self, settings: RolloutSettings, retriever: RetrieverClient) -> None:
        """A subclass may take further parameters: `rollout.environments.<data_source>.params`."""
        self.max_turns = settings.max_turns
        self.retriever = retriever
        self._budget = Budget(settings.max_response_length)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a generation and stay part of it."""
        return tuple(f"</{tag}>" for tag in self.tags)

    def budget(self, episode: Episode) -> Budget:
        """Limits of the next generation's length."""
        return self._budget

    def parse(self, text: str, episode: Episode) -> Action:
        """Read the first complete block of a generation as its action; without one the action is invalid.

        Args:
            text: the generation without a control token at its end.
        """
        # Finds what the pattern <(tag)>(.*?)</tag> does, which is quadratic on opening tags without closing ones.
        blocks = []
        for tag in self.tags:
            begin = text.find(f"<{tag}>")
            end = text.find(f"</{tag}>", begin) if begin >= 0 else -1
            if end >= 0:  # else no later opening tag has a closing one either
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
                stays out of loss and baseline. Any other exception has the same effect, as an internal error.
        """
        raise NotImplementedError(f"<{action.tag}> is a tag of {type(self).__name__}, which does not respond to it")

    async def close(self) -> None:
        """Close the environment's connections and files."""
