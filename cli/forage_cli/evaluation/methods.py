"""Methods: the question with searches, and baselines without. A method is a prompt and an environment."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from forage_proto.v1.trajectory_pb2 import ChatMessage, Document
from forage_runtime.text.observation import escape_tags, format_passages
from forage_runtime.text.tags import CLOSE, OPEN, Tag

if TYPE_CHECKING:
    from forage_records.questions import Question

SINGLE_TURN = "single_turn"
"""Environment of every baseline: one generation, without observations."""


class Method(StrEnum):
    """Prompt and environment in which a policy answers.

    `search` is the unchanged question in the environment of its data source, which training optimises.
    """

    SEARCH = "search"
    DIRECT = "direct"
    COT = "cot"
    RAG = "rag"

    @property
    def display_name(self) -> str:
        """Name in tables and plots."""
        return _TITLES[self]


_TITLES = {
    Method.SEARCH: "search",
    Method.DIRECT: "direct answer",
    Method.COT: "chain of thought",
    Method.RAG: "one-shot RAG",
}
_EXAMPLE = "For example, <answer> Beijing </answer>."
_DIRECT = f"Answer the given question. Give only the answer, at once, inside <answer> and </answer>. {_EXAMPLE}"
_COT = (
    "Answer the given question from what you know. Reason step by step inside <think> and </think>. "
    f"Then give only the answer inside <answer> and </answer>. {_EXAMPLE}"
)
_RAG = (
    f"Answer the given question with the help of the passages. Give only the answer inside <answer> and </answer>. "
    f"{_EXAMPLE}"
)
_EQUATION = (
    "Write an equation with the numbers {numbers} that equals {target}. "
    "Use each number exactly once, with + - * / and parentheses. "
    "Write only the left side of the equation, at once, inside <answer> and </answer>, "
    "for example <answer> (1 + 2) / 3 </answer>.\n"
)


def is_applicable(method: Method, question: Question) -> bool:
    """Whether the method applies to the question.

    A countdown problem has nothing to retrieve, and its own prompt is a chain of thought.
    """
    return method in (Method.SEARCH, Method.DIRECT) or not is_countdown(question)


def is_countdown(question: Question) -> bool:
    """Whether the answer is an equation, not a text."""
    return question.ground_truth.HasField("countdown_target")


def choose_environment(method: Method) -> str:
    """Return the name for `Prompt.environment`; "" = that of the data source."""
    return "" if method is Method.SEARCH else SINGLE_TURN


def build_messages(method: Method, question: Question, documents: Sequence[Document] = ()) -> list[ChatMessage]:
    """Build the chat messages of the prompt.

    Args:
        documents: for `rag`, the result of one search for the question; their tags are escaped as in observations, and
            the rollout service escapes the control tokens of every message.
    """
    if method is Method.SEARCH:
        return list(question.messages)
    truth = question.ground_truth
    if is_countdown(question):
        numbers = ", ".join(map(str, truth.countdown_numbers))
        text = _EQUATION.format(numbers=numbers, target=truth.countdown_target)
    elif method is Method.RAG:
        shown = escape_tags(format_passages(documents).strip())
        text = f"{OPEN[Tag.INFORMATION]}{shown}{CLOSE[Tag.INFORMATION]}\n{_RAG} Question: {question.text}\n"
    else:
        text = f"{_DIRECT if method is Method.DIRECT else _COT} Question: {question.text}\n"
    return [ChatMessage(role="user", content=text)]
