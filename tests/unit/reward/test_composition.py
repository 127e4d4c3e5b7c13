"""Weighted sums of rewards, and sums with a part that has no value."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward import registry
from forage_reward.composition import CompositionPart, compose_scorers
from forage_reward.reward import Reward, RewardParams
from forage_reward.router import RewardRouter
from forage_reward.score import Component, Score, Status, sum_components, withhold_score
from forage_reward.serve.describe import describe_rewards
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RewardPart, RewardSettings, load_settings

EMPTY, TRUTH = TrajectoryView(()), GroundTruth(("Oslo",))


def build_part(score: Score) -> CompositionPart:
    return CompositionPart(score.reward, 2.0, lambda view, truth: score)


def build_ok(name: str, *components: Component) -> CompositionPart:
    return build_part(sum_components(name, components, "fine"))


def build_abstaining(name: str) -> CompositionPart:
    return build_part(withhold_score(Status.ABSTAIN, name, "nothing to say"))


def test_components_keep_their_raw_value_and_are_weighted() -> None:
    parts = [
        CompositionPart("a", 0.5, build_ok("a", Component("x", 1.0, 3.0), Component("_log", 7.0, 0.0)).scorer),
        CompositionPart("b", -1.0, build_ok("b", Component("y", 0.5, 0.5)).scorer),
    ]
    score = compose_scorers("a+b", parts)(EMPTY, TRUTH)
    assert score.components == (
        Component("a.x", 1.0, 1.5),
        Component("_a.log", 7.0, 0.0),
        Component("_a", 3.0, 0.0),
        Component("b.y", 0.5, -0.5),
        Component("_b", 0.5, 0.0),
    )
    assert (score.status, score.total, score.reward) == (Status.OK, 1.0, "a+b")


def test_a_part_that_abstains_adds_nothing_and_is_listed() -> None:
    score = compose_scorers("whole", [build_ok("a", Component("x", 1.0, 1.0)), build_abstaining("b")])(EMPTY, TRUTH)
    assert (score.status, score.total) == (Status.OK, 2.0)
    assert score.components[-1] == Component("_b.abstained", 1.0, 0.0)
    assert "b: nothing to say" in score.detail


def test_the_sum_abstains_when_all_parts_abstain() -> None:
    score = compose_scorers("whole", [build_abstaining("a"), build_abstaining("b")])(EMPTY, TRUTH)
    assert (score.status, score.total) == (Status.ABSTAIN, 0.0)


@pytest.mark.parametrize("status", [Status.INVALID_INPUT, Status.TIMEOUT, Status.INTERNAL])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_part_without_a_value_leaves_the_sum_without_one(status: Status, place: int) -> None:
    parts = [build_ok("a", Component("x", 1.0, 1.0)), build_abstaining("b")]
    parts.insert(place, build_part(withhold_score(status, "c", "broken")))
    score = compose_scorers("whole", parts)(EMPTY, TRUTH)
    assert (score.status, score.total, score.components) == (status, 0.0, ())
    assert score.detail == "c: broken"


weights = st.floats(-100, 100)
values = st.lists(st.tuples(weights, weights), max_size=4)


@given(st.lists(st.tuples(weights, values), min_size=1, max_size=4))
def test_the_total_is_the_weighted_sum_of_the_parts(parts: list[tuple[float, list[tuple[float, float]]]]) -> None:
    built, want = [], 0.0
    for index, (weight, components) in enumerate(parts):
        result = sum_components("r", tuple(Component("c", raw, weighted) for raw, weighted in components), "")
        built.append(CompositionPart(f"p{index}", weight, lambda view, truth, result=result: result))  # type: ignore[misc]
        want += weight * result.total
    score = compose_scorers("whole", built)(EMPTY, TRUTH)
    assert score.total == pytest.approx(want, abs=1e-6)
    kept = [component.weighted for component in score.components if not component.name.startswith("_")]
    assert score.total == pytest.approx(sum(kept), abs=1e-6)


def build_item(text: str, truth: trajectory_pb2.GroundTruth | None = None) -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(
        data_source="nq",
        spans=[trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text=text)],
        ground_truth=truth or trajectory_pb2.GroundTruth(targets=["Oslo"]),
    )


def build_router(*components: RewardPart) -> RewardRouter:
    return RewardRouter({"nq": components})


def test_a_route_of_components_scores_each_and_validates_by_em_alone() -> None:
    components = RewardPart(name="em", weight=0.5), RewardPart(name="f1", weight=2.0)
    both = build_router(*components)
    scored_item = both.score(build_item("<answer>Oslo city</answer>"))
    assert scored_item.score.reward == "em+f1"
    assert scored_item.score.total == pytest.approx(2 * 2 / 3)
    assert {part.name: (part.raw, part.weighted) for part in scored_item.score.components} == {
        "em.exact_match": (0.0, 0.0),
        "_em": (0.0, 0.0),
        "f1.f1": (pytest.approx(2 / 3), pytest.approx(4 / 3)),
        "_f1": (pytest.approx(2 / 3), 0.0),
    }
    assert (scored_item.validation_score.reward, scored_item.validation_score.total) == ("em", 0.0)
    description = describe_rewards(both.rewards, RewardSettings(routes={"nq": components}))
    uses = {reward.name: [use.data_source for use in reward.uses] for reward in description.rewards}
    assert [uses["em"], uses["f1"], uses["subem"]] == [["nq"], ["nq"], []]


def test_the_same_reward_may_come_twice_under_two_labels() -> None:
    scored_item = build_router(
        RewardPart(name="em"), RewardPart(name="em", label="strict", params={"format_score": -1.0})
    ).score(build_item("<answer>Rome</answer>"))
    assert scored_item.score.total == -1.0
    assert scored_item.score.reward == "em+strict"


def test_a_structured_part_keeps_its_turns_after_composition() -> None:
    scored_item = build_router(RewardPart(name="structured", weight=2.0), RewardPart(name="em")).score(
        build_item("<think>t</think><answer>Oslo</answer>")
    )
    weighted = {part.name: part.weighted for part in scored_item.score.components}
    assert weighted["structured.turn_1"] == pytest.approx(0.5)
    counted = [value for name, value in weighted.items() if not name.startswith("_")]
    assert sum(counted) == pytest.approx(scored_item.score.total)


def test_a_sum_that_is_not_finite_is_internal_and_never_a_reward() -> None:
    big = RewardPart(name="em", weight=1e308, params={"score": 1e308})
    scored_item = build_router(big).score(build_item("<answer>Oslo</answer>"))
    assert scored_item.score.status == trajectory_pb2.STATUS_INTERNAL
    assert (scored_item.score.total, scored_item.validation_score.total) == (0.0, 1.0)


class NoParams(RewardParams):
    """None."""


def test_a_part_that_raises_is_internal_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(view: TrajectoryView, truth: GroundTruth, params: NoParams) -> Score:
        raise RecursionError("too deep")

    monkeypatch.setattr(
        registry, "REWARDS", {**registry.REWARDS, "faulty": Reward("faulty", "fails", NoParams, raise_error)}
    )
    scored_item = build_router(RewardPart(name="em"), RewardPart(name="faulty")).score(
        build_item("<answer>Oslo</answer>")
    )
    assert scored_item.score.status == trajectory_pb2.STATUS_INTERNAL
    assert scored_item.score.detail == "faulty: RecursionError: too deep"


@pytest.mark.parametrize(
    ("route", "sentence"),
    [
        ("[]", "routes.nq.*at least 1"),
        ("{}", "routes.nq.0.name.*required"),
        ("[{name: em}, {name: em}]", "routes.nq'.*two parts are called 'em'"),
        ("[{name: em, weight: .inf}]", "routes.nq.0.weight.*finite"),
        ("[{name: em, weight: .nan}]", "routes.nq.0.weight.*finite"),
        ("[{name: em, wait: 1}]", "unknown setting 'reward.routes.nq.0.wait'"),
        ("[{weight: 1}]", "routes.nq.0.name.*required"),
        ("[{name: em, label: _x}]", "routes.nq.0.label"),
        ("[{name: exact, weight: 2}]", "routes.nq.0 asks for the reward 'exact'"),
        ("[{name: f1}, {name: em, params: {skore: 1}}]", "routes.nq.1.params.skore does not exist"),
    ],
)
def test_an_invalid_composition_is_a_settings_error(tmp_path: Path, route: str, sentence: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"reward: {{routes: {{nq: {route}}}}}")
    with pytest.raises(SettingsError, match=sentence):
        RewardRouter(load_settings(file, environ={}).reward.routes)


def test_routes_of_one_reward_and_of_components_survive_a_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("reward: {routes: {nq: {name: em}, hotpotqa: [{name: em, weight: 0.5}]}}")
    settings = load_settings(file, environ={})
    assert settings.reward.routes["nq"] == (RewardPart(name="em"),)
    file.write_text(settings.to_yaml())
    assert load_settings(file, environ={}) == settings


@pytest.mark.parametrize(
    ("answer", "want"), [("<answer>3+4</answer>", 1.0), ("<answer>3-4</answer>", 0.0), ("none", 0.0)]
)
def test_a_countdown_problem_is_validated_by_its_own_score(answer: str, want: float) -> None:
    problem = trajectory_pb2.GroundTruth(countdown_target=7, countdown_numbers=[3, 4])
    validation = build_router(RewardPart(name="countdown")).score(build_item(answer, problem)).validation_score
    assert (validation.reward, validation.status, validation.total) == ("countdown", trajectory_pb2.STATUS_OK, want)


def test_infinite_weights_are_refused_in_code() -> None:
    with pytest.raises(ValueError, match="finite"):
        RewardPart(name="em", weight=math.inf)
