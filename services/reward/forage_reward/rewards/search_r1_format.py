"""`search_r1_format`: exact match in layers; a valid format and retrieved evidence earn part of the score without it.

| format  | evidence | answer | total                                       |
|---------|----------|--------|---------------------------------------------|
| valid   | any      | right  | score                                       |
| valid   | right    | wrong  | structure_format_score + retrieval_score    |
| valid   | wrong    | wrong  | structure_format_score                      |
| invalid | any      | right  | score - structure_format_score              |
| invalid | any      | wrong  | final_format_score                          |
| any     | any      | none   | 0                                           |

Source: the layered reward of Search-R1's empirical study (arXiv 2505.15117).
"""

from __future__ import annotations

from forage_reward.parsing.answers import extract_observations, extract_solution
from forage_reward.parsing.sequence import is_valid_sequence
from forage_reward.reward import Reward, RewardParams
from forage_reward.score import NO_TARGETS, Component, Score, Status, sum_components, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.text.answers import em_check, is_retrieval_correct

NAME = "search_r1_format"


class Params(RewardParams):
    """The weights of the layers, see the table above."""

    score: float = 1.0
    structure_format_score: float = 0.2
    final_format_score: float = 0.1
    retrieval_score: float = 0.1


def compute_score(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """Return components, raw 1 or 0: `exact_match` and `format` always, `retrieval` where the format is valid,
    `final_answer` for a wrong answer in an invalid format."""
    if not truth.targets:
        return withhold_score(Status.INVALID_INPUT, NAME, NO_TARGETS)
    is_valid, reason = _check_format(view)
    answer = extract_solution(view)
    if answer is None:
        return sum_components(NAME, (Component("exact_match", 0.0, 0.0), Component("format", 0.0, 0.0)), "no answer")
    is_right = em_check(answer, truth.targets)
    match = Component("exact_match", float(is_right), params.score if is_right else 0.0)
    if not is_valid:
        lost = Component("format", 0.0, -params.structure_format_score if is_right else 0.0)
        if is_right:
            return sum_components(NAME, (match, lost), f"right answer, invalid format: {reason}")
        kept = Component("final_answer", 1.0, params.final_format_score)
        return sum_components(NAME, (match, lost, kept), f"wrong answer, invalid format: {reason}")
    is_evidence = is_retrieval_correct(extract_observations(view), truth.targets)
    if is_right:
        components = (match, Component("format", 1.0, 0.0), Component("retrieval", float(is_evidence), 0.0))
        return sum_components(NAME, components, "right answer, valid format")
    structure = Component("format", 1.0, params.structure_format_score)
    evidence = Component("retrieval", float(is_evidence), params.retrieval_score if is_evidence else 0.0)
    detail = f"wrong answer, valid format, answer {'among' if is_evidence else 'not among'} the observations"
    return sum_components(NAME, (match, structure, evidence), detail)


def _check_format(view: TrajectoryView) -> tuple[bool, str]:
    if not view.has_role_marker:
        return False, "the prompt ends in a plain 'Assistant:', which opens no assistant turn"
    result = is_valid_sequence(view.assistant_part)
    return result.valid, result.reason


REWARD = Reward(NAME, "exact match, layered with format and retrieved evidence", Params, compute_score)
