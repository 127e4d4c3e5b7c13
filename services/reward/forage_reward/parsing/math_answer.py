"""The mathematical answer of a trajectory: the last `<answer>`, otherwise the last `\\boxed{…}`."""

from __future__ import annotations

from forage_reward.parsing.answers import extract_solution
from forage_reward.trajectory import Role, TrajectoryView

MAX_LENGTH = 1_000
"""Characters of an expression; a longer one is a wrong answer."""

_BOXED = "\\boxed{"


def extract_math_answer(view: TrajectoryView) -> str | None:
    """Extract the expression that the model gives as its answer; None where there is none."""
    answer = extract_solution(view)
    if answer is not None:
        inner = find_last_boxed(answer)
        return (answer if inner is None else inner).strip().strip("$").strip()
    for text in reversed(view.texts(Role.MODEL)):
        boxed = find_last_boxed(text)
        if boxed is not None:
            return boxed.strip().strip("$").strip()
    return None


def find_last_boxed(text: str) -> str | None:
    """Find the content of the last `\\boxed{…}`; None where there is none, or where its brace is not closed."""
    begin = text.rfind(_BOXED)
    if begin < 0:
        return None
    begin += len(_BOXED)
    end = _find_closing_brace(text, begin)
    return None if end < 0 else text[begin:end]


def is_balanced(text: str) -> bool:
    """Whether braces are balanced, so that the text cannot close a brace around it."""
    return _find_closing_brace(text + "}", 0) == len(text)


def _find_closing_brace(text: str, begin: int) -> int:
    depth = 1
    for index in range(begin, min(len(text), begin + MAX_LENGTH + 2)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
    return -1
