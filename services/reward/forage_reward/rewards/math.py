"""`math`: the answer is mathematically equal to an accepted one, by math-verify.

The answer is the last `<answer>`, otherwise the last `\\boxed{…}`. Comparison runs in separate processes with a time
and a memory limit: an answer that cannot be checked within them has no score, never a 0.
"""

from __future__ import annotations

import threading

from pydantic import Field

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward.deadline import limit_to_deadline
from forage_reward.isolation.math_process import MEMORY_MIB
from forage_reward.parsing.math_answer import MAX_LENGTH, extract_math_answer, is_balanced
from forage_reward.parsing.math_text import Percent, rewrite_numbers
from forage_reward.reward import Reward
from forage_reward.rewards.matching import MatchParams, score_match
from forage_reward.score import NO_TARGETS, Score, Status, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import from_proto
from forage_runtime.settings.security import UserCode
from forage_sandbox.child import Child, ChildDiedError, ChildTimeoutError
from forage_sandbox.support import build_confinement

NAME = "math"
EQUAL = "equal"
"""The component that says whether the answer is equal, raw 1 or 0."""
PROCESSES = 2
"""Comparisons at the same time. A process takes about 100 MB, and 3 seconds to start, at the first answer."""


class Params(MatchParams):
    """Values of a right and of a wrong answer; no answer earns 0. `timeout_s` limits one comparison.

    Attributes:
        percent: what `10%` is equal to: the `number` 10 or the `fraction` 0.1. math-verify takes both for right.
    """

    timeout_s: float = Field(5.0, gt=0)
    percent: Percent = "number"


def compute_score(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """Return 1 component: `equal`, raw 1 where the answer equals an accepted one."""
    if not truth.targets:
        return withhold_score(Status.INVALID_INPUT, NAME, NO_TARGETS)
    answer = extract_math_answer(view)
    if answer is None or (answer and answer in truth.targets):
        return score_match(NAME, EQUAL, None if answer is None else True, params)
    if not answer or len(answer) > MAX_LENGTH or not is_balanced(answer):
        return score_match(NAME, EQUAL, False, params, "the answer is no expression")
    texts = [rewrite_numbers(text, params.percent) for text in (answer, *truth.targets)]
    result = _POOL.compare(texts[0], tuple(texts[1:]), params.timeout_s)
    return score_match(NAME, EQUAL, result.total > 0, params) if result.status is Status.OK else result


class _Pool:
    """Up to `PROCESSES` children, started on demand. Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[Child] = []
        self._slots = threading.BoundedSemaphore(PROCESSES)

    def compare(self, answer: str, targets: tuple[str, ...], timeout_s: float) -> Score:
        """Compare in a child: OK with total 1 or 0, otherwise TIMEOUT, INTERNAL or INVALID_INPUT."""
        item = reward_pb2.ScoreItem(
            spans=[trajectory_pb2.Span(text=_replace_surrogates(answer))],
            ground_truth=trajectory_pb2.GroundTruth(targets=map(_replace_surrogates, targets)),
        )
        if not self._slots.acquire(timeout=limit_to_deadline(timeout_s)):
            return withhold_score(Status.TIMEOUT, NAME, f"no process was free within {timeout_s:g} s")
        child = None
        try:
            child = self._take_idle() or _start()
            reply = child.call(item.SerializeToString(), limit_to_deadline(timeout_s) or 0.001)
            self._idle.append(child)
            child = None
            return from_proto(trajectory_pb2.Score.FromString(reply))
        except ChildTimeoutError as error:
            return withhold_score(Status.TIMEOUT, NAME, f"the answer cannot be checked in time: {error}")
        except ChildDiedError as error:
            return withhold_score(Status.INTERNAL, NAME, f"the process that checks answers {error}")
        finally:
            if child is not None:
                child.kill()
            self._slots.release()

    def _take_idle(self) -> Child | None:
        while True:
            try:
                child = self._idle.pop()
            except IndexError:
                return None
            if child.is_alive:
                return child
            child.kill()


def _start() -> Child:
    confinement = build_confinement(NAME, UserCode(), MEMORY_MIB, "auto")
    return Child("forage_reward.isolation.math_process", confinement=confinement).wait_until_ready()


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which protobuf strings cannot hold."""
    return text.encode("utf-8", "replace").decode()


_POOL = _Pool()

REWARD = Reward(NAME, "the answer equals an accepted one mathematically", Params, compute_score, blocking=True)
