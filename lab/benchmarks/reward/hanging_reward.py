"""The soak's user reward: exact match that hangs on every 1,000th call of its process."""

import time
from collections.abc import Mapping

from forage_reward.parsing.answers import extract_solution
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.text.answers import em_check

HANG_EVERY = 1000
calls = 0


def score(view: TrajectoryView, truth: GroundTruth, params: Mapping[str, object]) -> float:
    global calls
    calls += 1
    if calls % HANG_EVERY == 0:
        time.sleep(3600)
    return float(em_check(extract_solution(view), truth.targets))
