"""A user reward: exact match, less a little for every word beyond what was asked for.

reward:
  user:
    short_answer: {function: examples/rewards/short_answer.py:score, timeout_s: 1}
  routes:
    nq: {name: short_answer, params: {penalty: 0.1}}
"""

from collections.abc import Mapping

from forage_reward.parsing.answers import extract_solution
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.text.answers import em_check


def score(view: TrajectoryView, truth: GroundTruth, params: Mapping[str, object]) -> dict[str, float]:
    answer = extract_solution(view)
    if answer is None:
        return {"exact_match": 0.0}
    words = len(answer.split())
    asked = max((len(target.split()) for target in truth.targets), default=1)
    return {
        "exact_match": float(em_check(answer, truth.targets)),
        "length": -float(str(params.get("penalty", 0.1))) * max(0, words - asked),
        "_words": float(words),  # "_" = for logs only, not part of the reward
    }
