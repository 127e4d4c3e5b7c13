"""`countdown`: an equation that uses each given number once and equals the target.

| answer on the last line of the model's text   | total        |
|----------------------------------------------|--------------|
| none                                         | 0            |
| uses other numbers, or is not arithmetic     | format_score |
| does not equal the target                    | format_score |
| equals the target                            | score        |

Source: TinyZero's countdown task, with a parser instead of its evaluation of the answer as code. As there an equation
is right within 1e-5 of the target. Unlike there white space and end-of-turn tokens after the answer are not a line, and
an answer may begin on an earlier line than its closing tag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from forage_reward.parsing.arithmetic import MAX_LENGTH, ArithmeticFormError, evaluate
from forage_reward.parsing.raw_text import ASSISTANT_MARKER, PLAIN_MARKER
from forage_reward.reward import Reward, RewardParams
from forage_reward.score import Component, Score, Status, sum_components, withhold_score
from forage_reward.trajectory import GroundTruth, Role, TrajectoryView
from forage_runtime.text.tags import CLOSE, OPEN, Tag, find_last_block

NAME = "countdown"
TOLERANCE = Fraction(1, 100_000)
_ENDS_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<eos>", "</s>")
_MOST_ENDS = 4
"""End-of-turn tokens after an answer: each costs a pass over the text."""
_INTEGER = re.compile(r"\d+")


class Params(RewardParams):
    """Values of a right equation and of any other answer; no answer earns 0."""

    score: float = 1.0
    format_score: float = 0.1


def compute_score(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """Return 1 component: `equation`, raw 1 where it uses the numbers and equals the target."""
    if truth.countdown_target is None:
        return withhold_score(
            Status.INVALID_INPUT, NAME, "ground_truth.countdown_target is missing: give target and numbers"
        )
    answer = extract_equation("".join(view.texts(Role.MODEL)), view.end_of_turn)
    if answer is None:
        return sum_components(NAME, (Component("equation", 0.0, 0.0),), "no answer on the last line")
    violation = find_violation(answer, truth.countdown_target, truth.countdown_numbers)
    if violation:
        return sum_components(NAME, (Component("equation", 0.0, params.format_score),), f"wrong equation: {violation}")
    return sum_components(NAME, (Component("equation", 1.0, params.score),), "right equation")


def extract_equation(text: str, end_of_turn: str = "") -> str | None:
    """Extract the last answer that ends on the last line after the first role marker, stripped; None without one.

    Args:
        end_of_turn: the tokenizer's end-of-turn text; it and the usual ones may follow the answer.
    """
    for marker in (PLAIN_MARKER, ASSISTANT_MARKER):
        if marker in text:
            text = text.partition(marker)[2]
            break
    text = _strip_ends(text, end_of_turn)
    answer = find_last_block(text.rpartition("\n")[2], Tag.ANSWER)
    if answer is None:  # it may have begun on an earlier line
        begin = text.rfind(OPEN[Tag.ANSWER])
        end = text.find(CLOSE[Tag.ANSWER], max(begin, 0))
        if 0 <= begin < end and "\n" not in text[end:]:
            answer = text[begin + len(OPEN[Tag.ANSWER]) : end]
    # A point that ends a sentence: TinyZero takes it after a number, as the end of a decimal.
    return answer.strip().removesuffix(".").rstrip() if answer is not None else None


def _strip_ends(text: str, end_of_turn: str) -> str:
    markers = tuple(filter(None, (end_of_turn, *_ENDS_OF_TURN)))
    text = text.rstrip()
    for _ in range(_MOST_ENDS):
        marker = next(filter(text.endswith, markers), "")
        text = text[: len(text) - len(marker)].rstrip()
    return text


def find_violation(equation: str, target: float, numbers: Sequence[float]) -> str:
    """Say which rule an equation violates; "" where it uses the numbers and is within 1e-5 of the target."""
    if len(equation) > MAX_LENGTH:
        return f"it has {len(equation)} characters, allowed are {MAX_LENGTH}"
    if sorted(int(digits) for digits in _INTEGER.findall(equation)) != sorted(numbers):
        return f"it does not use exactly the numbers {', '.join(map(str, numbers))}"
    try:
        value = evaluate(equation)
    except ArithmeticFormError as error:
        return str(error)
    if abs(value - Fraction(target)) >= TOLERANCE:
        return f"it does not equal {target}"
    return ""


REWARD = Reward(NAME, "an equation of the given numbers that equals the target", Params, compute_score)
