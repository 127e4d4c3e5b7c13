"""The mathematical answer of a text: what stands in the last `<answer>`, else in the last `\\boxed{…}`."""

from __future__ import annotations

from forage_reward.parsing.answers import extract_solution
from forage_reward.trajectory import Role, TrajectoryView

MAX_LENGTH = 1_000
"""Characters of an expression; a longer one is wrong."""

_BOXED = "\\boxed{"


def math_answer(view: TrajectoryView) -> str | None:
    """The expression that the model gives as its answer; None where there is none."""
    answer = extract_solution(view)
    if answer is not None:
        inner = last_boxed(answer)
        return (answer if inner is None else inner).strip().strip("$").strip()
    for text in reversed(view.texts(Role.MODEL)):
        boxed = last_boxed(text)
        if boxed is not None:
            return boxed.strip().strip("$").strip()
    return None


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}`; None where there is none, or where its brace is not closed."""
    begin = text.rfind(_BOXED)
    if begin < 0:
        return None
    begin += len(_BOXED)
    end = _closing(text, begin)
    return None if end < 0 else text[begin:end]


def is_balanced(text: str) -> bool:
    """Whether every brace has its partner, so that the text cannot break out of braces around it."""
    return _closing(text + "}", 0) == len(text)


def _closing(text: str, begin: int) -> int:
    depth = 1
    for index in range(begin, min(len(text), begin + MAX_LENGTH + 2)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
    return -1
