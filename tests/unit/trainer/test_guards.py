"""Guards on series of metrics: what trips which, and what they keep."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import GuardSettings, load_settings
from forage_trainer.checkpoints.rollbacks import ROLLBACKS, ROLLED_BACK, GuardStopError, Rollbacks, make_stop_error
from forage_trainer.reporting.guards import Guards, Trip

NAN, INF = float("nan"), float("inf")
SOUND = {
    "loss": 0.1, "grad_norm": 1.0, "reward_mean": 0.5, "kl_ref": 0.01, "entropy": 0.5, "dead_groups": 1,
    "logprob_diff_mean": 0.01,
}  # fmt: skip


def build_guards(*overrides: str) -> Guards:
    settings = load_settings(None, [f"trainer.guards.{one}" for one in overrides], {})
    return Guards(settings.trainer.guards, window=4)


def list_trips(guard: Guards, *steps: Mapping[str, Any]) -> list[list[str]]:
    return [[trip.guard for trip in guard.check({**SOUND, **step}, 10)] for step in steps]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({}, []),
        ({"loss": NAN}, ["non_finite"]),
        ({"grad_norm": INF}, ["non_finite"]),
        ({"loss": NAN, "grad_norm": NAN}, ["non_finite"]),
        ({"loss": None, "grad_norm": None, "kl_ref": None, "entropy": None, "logprob_diff_mean": None}, []),
        ({"entropy": NAN, "kl_ref": NAN}, []),
        ({"kl_ref": 1.0}, []),
        ({"kl_ref": 1.01}, ["kl"]),
        ({"entropy": 0.01}, []),
        ({"entropy": 0.009}, ["entropy"]),
        ({"dead_groups": 9}, []),
        ({"dead_groups": 10}, ["dead_groups"]),
        ({"dead_groups": 1, "filtered_groups": 9}, ["dead_groups"]),
        ({"logprob_diff_mean": 0.21}, ["logprob"]),
        ({"entropy": 0.0, "kl_ref": 9.0, "loss": -INF}, ["non_finite", "kl", "entropy"]),
    ],
)
def test_guards_on_a_single_step(step: dict[str, Any], expected: list[str]) -> None:
    assert list_trips(build_guards(), step) == [expected]


def test_a_step_without_an_update_trips_no_guard() -> None:
    assert build_guards().check({"reward_mean": None, "dead_groups": 0}, 10) == []


@pytest.mark.parametrize(
    ("norms", "trips"),
    [
        ([1, 99], []),  # too early to know what is usual
        ([1, 1, 10], []),
        ([1, 1, 10.1], [2]),
        ([1, 1, 1, 1, 99, 1, 99], [4, 6]),  # a median forgives a spike
        ([1, 1, 50, 50, 50, 50, 50], [2, 3]),  # and gets used to a new level
        ([1, 1, NAN, 11], [2, 3]),  # what is not finite is not remembered
    ],
)
def test_the_gradient_norm_guard_compares_with_the_previous_median(norms: list[float], trips: list[int]) -> None:
    result = list_trips(build_guards(), *({"grad_norm": norm} for norm in norms))
    assert [number for number, names in enumerate(result) if names] == trips


@pytest.mark.parametrize(
    ("rewards", "trips"),
    [
        ([0.8, 0.8, 0.8, 0.8, 0.5, 0.5, 0.5, 0.5], []),
        ([0.8, 0.8, 0.8, 0.8, 0.3, 0.3, 0.3, 0.3], [7]),  # one bad batch is not a collapse
        ([0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.0, 0.0, 0.0], [9]),
        ([-1.0, -1.0, -5.0, -9.0, -9.0], []),  # nothing to lose below zero
        ([0.8, None, 0.8, None, None, 0.0, 0.0, 0.0], [7]),
    ],
)
def test_the_reward_guard_compares_with_the_highest_mean(rewards: list[float], trips: list[int]) -> None:
    result = list_trips(build_guards(), *({"reward_mean": reward} for reward in rewards))
    assert [number for number, names in enumerate(result) if names] == trips


def test_guards_decide_the_same_after_a_restart() -> None:
    series = [{"grad_norm": 1 + n % 3, "reward_mean": 1 - 0.12 * n} for n in range(9)]
    series.append({"grad_norm": 40.0, "reward_mean": 0.0})
    straight = build_guards()
    expected = [straight.check({**SOUND, **step}, 10) for step in series]
    assert any(expected)
    for cut in range(len(series)):
        old, new = build_guards(), build_guards()
        result = [old.check({**SOUND, **step}, 10) for step in series[:cut]]
        new.load_state_dict(json.loads(json.dumps(old.state_dict())))
        result += [new.check({**SOUND, **step}, 10) for step in series[cut:]]
        assert result == expected


def test_actions_are_set_and_the_gravest_comes_first() -> None:
    assert list_trips(build_guards("actions.kl=ignore"), {"kl_ref": 5.0}) == [[]]
    trips = build_guards("actions={kl: warn, entropy: rollback, logprob: stop}").check(
        {**SOUND, "kl_ref": 5.0, "entropy": 0.0, "logprob_diff_mean": 3.0}, 10
    )
    assert [(trip.guard, trip.action) for trip in trips] == [
        ("entropy", "rollback"), ("logprob", "stop"), ("kl", "warn"),
    ]  # fmt: skip
    assert trips[0].reason == "entropy is 0, below 0.01"


def test_only_the_non_finite_guard_acts_by_default() -> None:
    actions = GuardSettings().actions
    assert {name for name, action in actions.items() if action != "warn"} == {"non_finite"}
    assert set(actions) == {"non_finite", "grad_norm", "kl", "reward", "entropy", "dead_groups", "logprob", "collapse"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actions.kl=pause", r"'trainer\.guards\.actions\.kl' is 'pause'"),
        (
            "actions.klx=warn",
            r"'trainer\.guards\.actions': there is no guard 'klx': expected non_finite, grad_norm, kl",
        ),
        ("thresholds.klx=1", r"'trainer\.guards\.thresholds': there is no guard 'klx'"),
        ("thresholds.grad_norm=0.5", r"'trainer\.guards\.thresholds': grad_norm is 0\.5: expected a number above 1"),
        ("thresholds.reward=1.5", r"reward is 1\.5: expected a number above 0, at most 1"),
        ("thresholds.dead_groups=1", "dead_groups is 1: expected a number from 0, below 1"),
        ("thresholds.entropy=-1", "entropy is -1: expected a number from 0"),
        ("thresholds.collapse=1", "collapse is 1: expected none, this guard has no threshold"),
        ("thresholds.kl=.nan", r"thresholds\.kl' is nan"),
    ],
)
def test_a_wrong_setting_is_named(override: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        build_guards(override)


TRIP = Trip("grad_norm", "rollback", "gradient norm is 99")


def test_rollbacks_survive_restarts_and_are_bounded(tmp_path: Path) -> None:
    first = Rollbacks(tmp_path, 2)
    assert not first.is_skipped(7)
    error = first.roll_back(7, TRIP)
    assert "guard 'grad_norm' at step 7: gradient norm is 99" in str(error)
    assert "rollback 1 of 2" in str(error)
    before = time.time()
    second = Rollbacks(tmp_path, 2)
    assert (second.is_skipped(7), second.is_skipped(8)) == (True, False)
    assert ROLLBACKS.collect()[0].samples[0].value == 1, "the next process exports it"
    assert before - 60 < ROLLED_BACK.collect()[0].samples[0].value <= before
    second.roll_back(9, TRIP)
    third = Rollbacks(tmp_path, 2)
    assert [step for step in range(12) if third.is_skipped(step)] == [7, 9]
    with pytest.raises(GuardStopError, match=r"at step 11.*max_rollbacks = 2 are used up \(before: steps 7, 9\)"):
        third.roll_back(11, TRIP)
    assert [one["step"] for one in json.loads((tmp_path / "rollbacks.json").read_text())] == [7, 9]


def test_an_unreadable_list_of_rollbacks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rollbacks.json").write_text("[{")
    with pytest.raises(UserError, match=r"rollbacks\.json cannot be read"):
        Rollbacks(tmp_path, 2)


def test_a_stop_names_guard_step_and_remedy() -> None:
    error = make_stop_error(4, TRIP)
    assert isinstance(error, UserError)
    for words in ("'grad_norm'", "step 4", "gradient norm is 99", "trainer.guards.actions.grad_norm"):
        assert words in str(error)
