"""`scripts/bench_against.py` runs two commits in turns and compares what both measure."""

from __future__ import annotations

from collections import Counter

import pytest
from bench_against import NOW, THEN, compare, find_figures, list_turns


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_each_side_runs_as_often_and_neither_always_first(rounds: int) -> None:
    turns = list_turns(rounds)
    assert Counter(turns) == {THEN: rounds, NOW: rounds}
    firsts = Counter(turns[::2])
    assert abs(firsts[THEN] - firsts[NOW]) <= 1


def test_every_number_is_a_figure_with_its_place_as_name() -> None:
    found = dict(find_figures({"a": 1, "b": {"c": [2.5, True, "x"], "d": None}}))
    assert found == {"a": 1.0, "b.c.0": 2.5}


def test_a_figure_is_the_median_of_a_side_and_its_ratio_that_of_now_over_then() -> None:
    then = [{"ms": 4.0, "errors": 0.0, "old": 1.0}, {"ms": 2.0, "errors": 0.0, "old": 1.0}]
    now = [{"ms": 1.0, "errors": 0.0, "new": 1.0}, {"ms": 2.0, "errors": 0.0}]
    compared = compare({THEN: then, NOW: now})
    assert compared == {
        "ms": {THEN: 3.0, NOW: 1.5, "ratio": 0.5},
        "errors": {THEN: 0.0, NOW: 0.0, "ratio": None},
    }
