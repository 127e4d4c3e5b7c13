"""`search_r1_format`: exact match in layers; a sound format and good evidence earn something without it.

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

from forage_common.text.answers import em_check, is_retrieval_correct
from forage_reward.parsing.answers import extract_solution, observations
from forage_reward.parsing.sequence import is_valid_sequence
from forage_reward.reward import Reward, RewardParams
from forage_reward.score import NO_TARGETS, Component, Score, Status, refused, scored
from forage_reward.trajectory import GroundTruth, TrajectoryView

NAME = "search_r1_format"


class Params(RewardParams):
    """The weights of the layers; see the table above."""

    score: float = 1.0
    structure_format_score: float = 0.2
    final_format_score: float = 0.1
    retrieval_score: float = 0.1


def judge(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """Components, raw 1 or 0: `exact_match` and `format` always, `retrieval` where the format is valid,
    `final_answer` for a wrong answer in an invalid format."""
    if not truth.targets:
        return refused(Status.INVALID_INPUT, NAME, NO_TARGETS)
    valid, reason = _format(view)
    answer = extract_solution(view)
    if answer is None:
        return scored(NAME, (Component("exact_match", 0.0, 0.0), Component("format", 0.0, 0.0)), "no answer")
    right = em_check(answer, truth.targets)
    match = Component("exact_match", float(right), params.score if right else 0.0)
    if not valid:
        lost = Component("format", 0.0, -params.structure_format_score if right else 0.0)
        if right:
            return scored(NAME, (match, lost), f"right answer, invalid format: {reason}")
        kept = Component("final_answer", 1.0, params.final_format_score)
        return scored(NAME, (match, lost, kept), f"wrong answer, invalid format: {reason}")
    found = is_retrieval_correct(observations(view), truth.targets)
    if right:
        components = (match, Component("format", 1.0, 0.0), Component("retrieval", float(found), 0.0))
        return scored(NAME, components, "right answer, valid format")
    structure = Component("format", 1.0, params.structure_format_score)
    evidence = Component("retrieval", float(found), params.retrieval_score if found else 0.0)
    detail = f"wrong answer, valid format, answer {'among' if found else 'not among'} the observations"
    return scored(NAME, (match, structure, evidence), detail)


def _format(view: TrajectoryView) -> tuple[bool, str]:
    if not view.has_role_marker:
        return False, "the prompt ends in a plain 'Assistant:', which opens no assistant turn"
    result = is_valid_sequence(view.assistant_part)
    return result.valid, result.reason


REWARD = Reward(NAME, "exact match, layered with format and retrieved evidence", Params, judge)
