"""`structured`: a reward for the action and format of every turn, plus one for the result of the whole trajectory.

A search turn earns `format_score` and `kg_query_validity`, an answering turn `format_score` and `is_answer_score`,
any other turn nothing. Total = mean over turns + exact_match + retrieval_quality.

A query is valid when its action was valid and executed, its retrieval succeeded, and no earlier valid query of the
trajectory was the same up to letter case and white space.

With `otc`, exact_match and retrieval_quality decrease with the number of executed searches m: both are multiplied by
cos(m * pi / (2 * m + c)), 1 without searches and decreasing towards 0. Source: the single-trajectory form of tool
efficiency in OTC (arXiv 2504.14870), where c is `otc_smoothness`. The other parts follow KG-R1's multi-turn reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from forage_reward.parsing.answers import extract_observations, extract_solution
from forage_reward.parsing.turns import TurnMismatchError, parse_strict_action, read_turns, split_generations
from forage_reward.reward import Reward, RewardParams
from forage_reward.score import NO_TARGETS, Component, Score, Status, sum_components, withhold_score
from forage_reward.trajectory import Action, GroundTruth, TrajectoryView, Turn
from forage_runtime.text.answers import em_check, f1, is_retrieval_correct

NAME = "structured"
_COMPARED = 2_000
"""Characters of a query that are compared with those of earlier ones."""


class Params(RewardParams):
    """Weights of the parts of a turn, then of the whole trajectory; see above."""

    kg_query_validity: float = 0.1
    is_answer_score: float = 0.1
    format_score: float = 0.15
    exact_match: float = 0.3
    retrieval_quality: float = 0.4
    exact_match_mode: Literal["binary", "f1"] = "binary"
    otc: bool = False
    otc_smoothness: float = Field(4.0, gt=0)


def compute_score(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """Return components `turn_1` … `turn_T` (raw: the reward of the turn; weighted: its share of the mean),
    `exact_match` and `retrieval_quality`; for logs the rates of valid queries, answers and formats over turns, the
    number of searches and the OTC factor."""
    if not truth.targets:
        return withhold_score(Status.INVALID_INPUT, NAME, NO_TARGETS)
    try:
        texts = split_generations(view)
    except TurnMismatchError as error:
        return withhold_score(Status.INVALID_INPUT, NAME, str(error))
    turns = read_turns(view)
    query_flags = flag_valid_queries(turns)
    answer_flags = [turn.action is Action.ANSWER for turn in turns]
    format_flags = [
        turn.action is not Action.INVALID and parse_strict_action(text) is turn.action
        for turn, text in zip(turns, texts, strict=True)
    ]
    earned = [
        params.kg_query_validity * query + params.is_answer_score * answer + params.format_score * form
        for query, answer, form in zip(query_flags, answer_flags, format_flags, strict=True)
    ]
    searches = sum(turn.answered for turn in turns)
    factor = compute_otc_factor(searches, params.otc_smoothness) if params.otc else 1.0
    match = _match_answer(view, truth, params.exact_match_mode)
    evidence = float(is_retrieval_correct(extract_observations(view), truth.targets))
    components = (
        *(Component(f"turn_{index}", part, part / len(earned)) for index, part in enumerate(earned, 1)),
        Component("exact_match", match, params.exact_match * match * factor),
        Component("retrieval_quality", evidence, params.retrieval_quality * evidence * factor),
        Component("_query_validity", _compute_rate(query_flags), 0.0),
        Component("_is_answer", _compute_rate(answer_flags), 0.0),
        Component("_format", _compute_rate(format_flags), 0.0),
        Component("_searches", float(searches), 0.0),
        Component("_otc_factor", factor, 0.0),
    )
    return sum_components(NAME, components, f"{len(turns)} turns, {searches} searches, exact match {match:.2f}")


def flag_valid_queries(turns: Sequence[Turn]) -> list[bool]:
    """Flag each turn that is a query, was executed, succeeded and repeats no earlier one."""
    seen: set[str] = set()
    valid = []
    for turn in turns:
        is_new = False
        if turn.action is Action.SEARCH and turn.answered:
            key = " ".join(turn.content[:_COMPARED].lower().split())
            is_new = key not in seen
            seen.add(key)
        valid.append(is_new)
    return valid


def compute_otc_factor(searches: int, smoothness: float) -> float:
    """Compute cos(m * pi / (2 * m + c)): 1 without searches, decreasing towards 0."""
    return math.cos(searches * math.pi / (2 * searches + smoothness))


def _match_answer(view: TrajectoryView, truth: GroundTruth, mode: str) -> float:
    answer = extract_solution(view)
    if answer is None:
        return 0.0
    return f1(answer, truth.targets) if mode == "f1" else float(em_check(answer, truth.targets))


def _compute_rate(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


REWARD = Reward(NAME, "action and format of each turn, plus exact match and retrieved evidence", Params, compute_score)
