"""The guard that warns early of a collapse: each sign trips it alone, and none does on a healthy run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_runtime.settings import load_settings
from forage_trainer.reporting.guards import WINDOW, Guards, Trend

DATA = Path(__file__).parents[2] / "data/trainer"
ONSET = 30
HEALTHY = {
    "entropy": 0.4, "repetition_rate": 0.01, "broken_tag_rate": 0.05, "foreign_letter_rate": 0.0, "search_rate": 0.8,
    "max_searches_rate": 0.05, "logprob_diff_mean": 0.01, "reward_mean": 0.7, "dead_groups": 0, "loss": 0.1,
    "grad_norm": 1.0, "kl_ref": 0.01,
}  # fmt: skip
COLLAPSES: dict[str, tuple[str, Callable[[int], float], int]] = {
    "entropy": ("the entropy rose", lambda late: 0.4 + 0.05 * late, 15),
    "repetition_rate": ("repeated 8-grams rose", lambda late: min(1, 0.01 + 0.02 * late), 10),
    "broken_tag_rate": ("broken tags rose", lambda late: min(1, 0.05 + 0.02 * late), 12),
    "foreign_letter_rate": ("foreign scripts rose", lambda late: min(1, 0.01 * late), 10),
    "search_rate": ("that search fell", lambda late: max(0, 0.8 - 0.02 * late), 16),
    "max_searches_rate": ("allows rose", lambda late: min(1, 0.05 + 0.02 * late), 20),
    "logprob_diff_mean": ("drift apart,", lambda late: 0.01 + 0.002 * late, 15),
}
"""Metric → words of its sign, its value so many steps after the onset, and the steps until it trips at the latest."""


def build_guards(*overrides: str) -> Guards:
    return Guards(load_settings(None, [f"trainer.guards.{one}" for one in overrides], {}).trainer.guards)


def list_reasons(guards: Guards, steps: Iterable[dict[str, Any]]) -> list[str]:
    """Why each step tripped the guard, empty if it did not; no other guard may trip."""
    found = [guards.check({**HEALTHY, **step}, 10) for step in steps]
    assert {trip.guard for trips in found for trip in trips} <= {"collapse"}
    return ["; ".join(trip.reason for trip in trips) for trips in found]


def make_series(metric: str, collapse: Callable[[int], float], steps: int) -> list[dict[str, Any]]:
    healthy = [{metric: HEALTHY[metric] * (1 + 0.2 * math.sin(7.3 * step))} for step in range(ONSET)]
    return [*healthy, *({metric: collapse(late)} for late in range(1, steps + 1))]


@pytest.mark.parametrize("metric", COLLAPSES)
def test_the_guard_trips_soon_after_a_collapse_begins_and_says_from_where_to_where(metric: str) -> None:
    words, collapse, latest = COLLAPSES[metric]
    reasons = list_reasons(build_guards(), make_series(metric, collapse, latest))
    assert not any(reasons[:ONSET])
    assert f"{words} from 0" in reasons[-1]
    assert all(words in reason for reason in reasons if reason), "no other sign is seen"


@pytest.mark.parametrize("action", ["rollback", "stop", "warn", "ignore"])
def test_the_guard_acts_as_set(action: str) -> None:
    guards, (_, collapse, latest) = build_guards(f"actions.collapse={action}"), COLLAPSES["repetition_rate"]
    trips = [guards.check({**HEALTHY, **step}, 10) for step in make_series("repetition_rate", collapse, latest)][-1]
    assert [(trip.guard, trip.action) for trip in trips] == ([] if action == "ignore" else [("collapse", action)])


def test_several_signs_are_one_trip() -> None:
    both = {"search_rate": 0.0, "repetition_rate": 0.5}
    reasons = list_reasons(build_guards(), [{}] * ONSET + [both] * 4)
    assert "8-grams rose from 0.01 to 0.5; the share of trajectories that search fell from 0.8 to 0" in reasons[-1]


@pytest.mark.parametrize("metric", COLLAPSES)
@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_values_that_are_unknown_trip_nothing_and_are_not_kept(metric: str, missing: float | None) -> None:
    _, collapse, latest = COLLAPSES[metric]
    assert not any(list_reasons(build_guards(), [{metric: missing}] * 60))
    series = make_series(metric, collapse, latest)
    guards, alone = build_guards(), Guards(build_guards()._settings)
    for step in series:
        assert list_reasons(guards, [{metric: missing}, step])[1] == list_reasons(alone, [step])[0]


@pytest.mark.parametrize("metric", COLLAPSES)
def test_neither_a_single_odd_step_nor_a_bad_beginning_trips(metric: str) -> None:
    odd = 0.0 if metric == "search_rate" else 0.19 if metric == "logprob_diff_mean" else 1.0
    spikes = [{metric: odd if step % 10 == 9 else HEALTHY[metric]} for step in range(60)]
    assert not any(list_reasons(build_guards(), spikes))
    # Bad from the first step on: it is what this run has, and other guards have absolute bounds.
    assert not any(list_reasons(build_guards(), [{metric: odd}] * 60))
    early = [{metric: HEALTHY[metric]}] * (WINDOW // 2 - 1) + [{metric: odd}] * 1
    assert not any(list_reasons(build_guards(), early)), "half a window is needed"


@pytest.mark.parametrize(
    ("metric", "before", "bound"),
    [
        ("entropy", 0.25, 0.75),
        ("repetition_rate", 0.0, 0.1),
        ("broken_tag_rate", 0.0, 0.15),
        ("foreign_letter_rate", 0.0, 0.05),
        ("search_rate", 1.0, 0.7),
        ("max_searches_rate", 0.0, 0.3),
        ("logprob_diff_mean", 0.01, 0.03),
        ("logprob_diff_mean", 0.08, 0.16),  # such as of a mixture of experts
    ],
)
def test_a_level_at_its_bound_does_not_trip_and_one_beyond_it_does(metric: str, before: float, bound: float) -> None:
    beyond = bound - 0.001 if metric == "search_rate" else bound + 0.001
    for value, expected in ((bound, False), (beyond, True)):
        reasons = list_reasons(build_guards(), [{metric: before}] * ONSET + [{metric: value}] * 8)
        assert bool(reasons[-1]) is expected


def test_a_drift_so_slow_that_every_window_looks_steady_trips() -> None:
    slow = [{"logprob_diff_mean": 0.01 + 0.0003 * step} for step in range(120)]
    assert "drift apart" in list_reasons(build_guards(), slow)[-1]


def test_a_run_that_learns_to_search_and_to_close_its_tags_trips_nothing() -> None:
    def learn(step: int) -> dict[str, Any]:
        done = min(1.0, step / 60)
        return {
            "search_rate": done, "max_searches_rate": 0.1 * done, "broken_tag_rate": 0.9 * (1 - done) + 0.05,
            "entropy": 2.5 * (1 - done) + 0.2, "reward_mean": done,
        }  # fmt: skip

    assert not any(list_reasons(build_guards(), map(learn, range(120))))


def test_the_healthy_demo_trips_no_guard() -> None:
    lines = (DATA / "guards_demo.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 40
    assert all(set(COLLAPSES) <= set(step) for step in steps)
    guards = build_guards()
    assert not any(guards.check(step, 16) for step in steps)


@given(st.lists(st.floats(-1, 1), max_size=60), st.integers(2, 24), st.sampled_from([min, max]), st.data())
def test_a_trend_compares_the_last_median_with_the_best_one_and_survives_a_restart(
    values: list[float], window: int, choose: Any, data: st.DataObject
) -> None:
    trend, cut = Trend(window, choose), data.draw(st.integers(0, len(values)))
    for number, value in enumerate(values):
        if number == cut:
            old, trend = trend, Trend(window, choose)
            trend.load_state_dict(json.loads(json.dumps(old.state_dict())))
        levels = [median(values[max(0, end - window) : end]) for end in range(1, number + 1) if 2 * end >= window]
        expected = None
        if levels:
            recent = values[max(0, number + 1 - max(1, window // 4)) : number + 1]
            expected = (median(recent), choose(levels))
        assert trend.add(value) == expected


def test_the_guard_decides_the_same_after_a_restart() -> None:
    _, collapse, latest = COLLAPSES["search_rate"]
    series = make_series("search_rate", collapse, latest)
    for cut in range(0, len(series), 7):
        old, new = build_guards(), build_guards()
        result = list_reasons(old, series[:cut])
        new.load_state_dict(json.loads(json.dumps(old.state_dict())))
        assert result + list_reasons(new, series[cut:]) == list_reasons(build_guards(), series)
