"""The answer of a mathematical trajectory, and what becomes of one that cannot be checked; no process is started."""

from __future__ import annotations

import pytest

from forage_reward.parsing.math_answer import extract_math_answer, is_balanced
from forage_reward.registry import bind_reward
from forage_reward.rewards import math
from forage_reward.score import Status
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView
from forage_sandbox.child import ChildDiedError, ChildTimeoutError


class Unable:
    """A process that gives no answer."""

    is_alive = True

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.is_killed = False

    def call(self, frame: bytes, timeout_s: float) -> bytes:
        raise self.error

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("error", "status"), [(ChildTimeoutError("no answer"), Status.TIMEOUT), (ChildDiedError("died"), Status.INTERNAL)]
)
def test_an_answer_that_cannot_be_checked_has_no_score_and_its_process_is_replaced(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: Status
) -> None:
    started: list[Unable] = []

    def start() -> Unable:
        started.append(Unable(error))
        return started[-1]

    monkeypatch.setattr(math, "_start", start)
    monkeypatch.setattr(math, "_POOL", math._Pool())
    view = TrajectoryView((Span(Role.MODEL, "<answer>9!!!!!</answer>"),))
    for count in (1, 2):
        score = bind_reward("math", {}, "here")(view, GroundTruth(("5",)))
        assert (score.status, score.components) == (status, ())
        assert [one.is_killed for one in started] == [True] * count


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("so \\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} done", "\\frac{1}{2}"),
        ("<answer> 3 </answer> not \\boxed{4}", "3"),
        ("<answer>$ 3 $</answer>", "3"),
        ("<answer>\\boxed{5}</answer>", "5"),
        ("\\boxed{1", None),
        ("\\boxed{" + "{" * 10_000_000, None),
        ("7", None),
        ("<answer></answer>", ""),
    ],
    ids=range(9),
)
def test_the_answer_is_the_last_answer_block_or_the_last_box(text: str, want: str | None) -> None:
    assert extract_math_answer(TrajectoryView((Span(Role.MODEL, text),))) == want


def test_only_boxes_of_the_model_count() -> None:
    spans = (Span(Role.PROMPT, "\\boxed{1}"), Span(Role.MODEL, "hm"), Span(Role.ENV, "\\boxed{2}"))
    assert extract_math_answer(TrajectoryView(spans)) is None


@pytest.mark.parametrize(
    ("text", "want"), [("", True), ("{}", True), ("{", False), ("}", False), ("}{", False), ("{}}", False)]
)
def test_braces_must_be_balanced(text: str, want: bool) -> None:
    assert is_balanced(text) is want
