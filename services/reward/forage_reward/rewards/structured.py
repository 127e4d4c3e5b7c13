"""`structured`: turn by turn, what was asked and how, plus what the whole trajectory reached.

A search turn earns `format_score` and `kg_query_validity`, an answering turn `format_score` and `is_answer_score`,
any other turn nothing. Total = mean over turns + exact_match + retrieval_quality.

A query is valid when the action was, it was executed, its retrieval succeeded, and no earlier query of the
trajectory that was valid said the same, letter case and blank aside.

With `otc`, exact_match and retrieval_quality shrink with the number of executed searches m: both are multiplied by
cos(m * pi / (2 * m + c)), 1 without searches and falling to 0. Source: the single-trajectory form of tool
efficiency in OTC (arXiv 2504.14870), where c is `otc_smoothness`. The other parts follow KG-R1's multi-turn reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from forage_common.text.answers import em_check, f1, is_retrieval_correct
from forage_reward.parsing.answers import extract_solution, observations
from forage_reward.parsing.turns import TurnMismatchError, formatted_action, generations, turns_of
from forage_reward.reward import Reward, RewardParams
from forage_reward.score import NO_TARGETS, Component, Score, Status, refused, scored
from forage_reward.trajectory import Action, GroundTruth, TrajectoryView, Turn

NAME = "structured"
_COMPARED = 2_000
"""Characters of a query that are compared with earlier ones."""


class Params(RewardParams):
    """Weights of the turn parts, then of the global ones; see above."""

    kg_query_validity: float = 0.1
    is_answer_score: float = 0.1
    format_score: float = 0.15
    exact_match: float = 0.3
    retrieval_quality: float = 0.4
    exact_match_mode: Literal["binary", "f1"] = "binary"
    otc: bool = False
    otc_smoothness: float = Field(4.0, gt=0)


def judge(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """Components: `turn_1` … `turn_T` (raw: what the turn earned; weighted: its part of the mean), `exact_match`,
    `retrieval_quality`; for logs the rates of valid queries, answers and formats over turns, searches and factor."""
    if not truth.targets:
        return refused(Status.INVALID_INPUT, NAME, NO_TARGETS)
    try:
        texts = generations(view)
    except TurnMismatchError as error:
        return refused(Status.INVALID_INPUT, NAME, str(error))
    turns = turns_of(view)
    valid = valid_queries(turns)
    answers = [turn.action is Action.ANSWER for turn in turns]
    formats = [
        turn.action is not Action.INVALID and formatted_action(text) is turn.action
        for turn, text in zip(turns, texts, strict=True)
    ]
    earned = [
        params.kg_query_validity * query + params.is_answer_score * answer + params.format_score * form
        for query, answer, form in zip(valid, answers, formats, strict=True)
    ]
    searches = sum(turn.answered for turn in turns)
    factor = otc_factor(searches, params.otc_smoothness) if params.otc else 1.0
    match = _match(view, truth, params.exact_match_mode)
    found = float(is_retrieval_correct(observations(view), truth.targets))
    components = (
        *(Component(f"turn_{index}", part, part / len(earned)) for index, part in enumerate(earned, 1)),
        Component("exact_match", match, params.exact_match * match * factor),
        Component("retrieval_quality", found, params.retrieval_quality * found * factor),
        Component("_query_validity", _rate(valid), 0.0),
        Component("_is_answer", _rate(answers), 0.0),
        Component("_format", _rate(formats), 0.0),
        Component("_searches", float(searches), 0.0),
        Component("_otc_factor", factor, 0.0),
    )
    return scored(NAME, components, f"{len(turns)} turns, {searches} searches, exact match {match:.2f}")


def valid_queries(turns: Sequence[Turn]) -> list[bool]:
    """Whether each turn is a query that was executed, succeeded and says something new."""
    said: set[str] = set()
    valid = []
    for turn in turns:
        new = False
        if turn.action is Action.SEARCH and turn.answered:
            key = " ".join(turn.content[:_COMPARED].lower().split())
            new = key not in said
            said.add(key)
        valid.append(new)
    return valid


def otc_factor(searches: int, smoothness: float) -> float:
    """cos(m * pi / (2 * m + c)): 1 for no search, falling towards 0 with every one."""
    return math.cos(searches * math.pi / (2 * searches + smoothness))


def _match(view: TrajectoryView, truth: GroundTruth, mode: str) -> float:
    answer = extract_solution(view)
    if answer is None:
        return 0.0
    return f1(answer, truth.targets) if mode == "f1" else float(em_check(answer, truth.targets))


def _rate(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


REWARD = Reward(NAME, "what each turn did, plus exact match and retrieved evidence", Params, judge)
