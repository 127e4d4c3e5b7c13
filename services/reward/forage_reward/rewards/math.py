"""`math`: the answer is mathematically equal to an accepted one, by math-verify.

The answer stands in the last `<answer>`, else in the last `\\boxed{…}`. Comparing runs in processes of its own with
a time and a memory limit: an answer that cannot be checked within them has no score, and never a 0.
"""

from __future__ import annotations

import threading

from pydantic import Field

from forage_common.v1 import reward_pb2, trajectory_pb2
from forage_reward.deadline import within
from forage_reward.isolation.child import START_TIMEOUT_S, Child, ChildDiedError, ChildTimeoutError
from forage_reward.parsing.math_answer import MAX_LENGTH, is_balanced, math_answer
from forage_reward.reward import Reward, RewardParams
from forage_reward.score import NO_TARGETS, Component, Score, Status, refused, scored
from forage_reward.trajectory import GroundTruth, TrajectoryView

NAME = "math"
PROCESSES = 2
"""That compare at once; each takes about 100 MB, and 3 seconds to start, at the first answer."""


class Params(RewardParams):
    """What a right and a wrong answer earn; no answer earns 0. `timeout_s` is of one comparison."""

    score: float = 1.0
    format_score: float = 0.0
    timeout_s: float = Field(5.0, gt=0)


def judge(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """1 component: `equal`, raw 1 where the answer equals an accepted one."""
    if not truth.targets:
        return refused(Status.INVALID_INPUT, NAME, NO_TARGETS)
    answer = math_answer(view)
    if answer is None:
        return scored(NAME, (Component("equal", 0.0, 0.0),), "no answer")
    if answer in truth.targets:
        return scored(NAME, (Component("equal", 1.0, params.score),), "right answer")
    if not answer or len(answer) > MAX_LENGTH or not is_balanced(answer):
        return scored(NAME, (Component("equal", 0.0, params.format_score),), "the answer is no expression")
    found = _POOL.compare(answer, truth.targets, params.timeout_s)
    if found.status != trajectory_pb2.STATUS_OK:
        return refused(_STATUSES.get(found.status, Status.INTERNAL), NAME, found.detail)
    if found.total > 0:
        return scored(NAME, (Component("equal", 1.0, params.score),), "right answer")
    return scored(NAME, (Component("equal", 0.0, params.format_score),), "wrong answer")


_STATUSES = {
    trajectory_pb2.STATUS_TIMEOUT: Status.TIMEOUT,
    trajectory_pb2.STATUS_INVALID_INPUT: Status.INVALID_INPUT,
}


class _Pool:
    """Up to `PROCESSES` children, started when needed. Any number of threads may share it."""

    def __init__(self) -> None:
        self._free: list[Child] = []
        self._places = threading.BoundedSemaphore(PROCESSES)

    def compare(self, answer: str, targets: tuple[str, ...], timeout_s: float) -> trajectory_pb2.Score:
        """OK with total 1 or 0; TIMEOUT or INTERNAL with the reason in its detail."""
        item = reward_pb2.ScoreItem(
            spans=[trajectory_pb2.Span(text=_sendable(answer))],
            ground_truth=trajectory_pb2.GroundTruth(targets=map(_sendable, targets)),
        )
        if not self._places.acquire(timeout=within(timeout_s)):
            return _failed(trajectory_pb2.STATUS_TIMEOUT, f"no process was free within {timeout_s:g} s")
        child = None
        try:
            child = self._idle() or _started()
            reply = trajectory_pb2.Score.FromString(child.call(item.SerializeToString(), within(timeout_s) or 0.001))
            self._free.append(child)
            child = None
            return reply
        except ChildTimeoutError as error:
            return _failed(trajectory_pb2.STATUS_TIMEOUT, f"the answer cannot be checked in time: {error}")
        except ChildDiedError as error:
            return _failed(trajectory_pb2.STATUS_INTERNAL, f"the process that checks answers {error}")
        finally:
            if child is not None:
                child.kill()
            self._places.release()

    def _idle(self) -> Child | None:
        while True:
            try:
                child = self._free.pop()
            except IndexError:
                return None
            if child.alive:
                return child
            child.kill()


def _started() -> Child:
    child = Child("forage_reward.isolation.math_process")
    try:
        # Not cut short by the caller's deadline: with short ones no process would ever be ready.
        child.receive(START_TIMEOUT_S)
    except (ChildTimeoutError, ChildDiedError):
        child.kill()
        raise
    return child


def _failed(status: trajectory_pb2.Status.ValueType, detail: str) -> trajectory_pb2.Score:
    return trajectory_pb2.Score(status=status, detail=detail)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


_POOL = _Pool()

REWARD = Reward(NAME, "the answer equals an accepted one mathematically", Params, judge, blocking=True)
