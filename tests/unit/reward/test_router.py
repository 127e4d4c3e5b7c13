"""Routing, invalid items and failing rewards."""

from __future__ import annotations

import math

import pytest

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward import registry
from forage_reward.reward import Reward, RewardParams
from forage_reward.router import RewardRouter
from forage_reward.score import Component, Score, sum_components
from forage_reward.serve.describe import describe_rewards
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RewardPart, RewardSettings

MODEL, ENV = trajectory_pb2.ROLE_MODEL, trajectory_pb2.ROLE_ENV


def build_item(
    text: str, source: str = "world_facts", role: trajectory_pb2.Role = MODEL, targets: tuple[str, ...] = ("Oslo",)
) -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(
        trajectory_id="t",
        data_source=source,
        spans=[trajectory_pb2.Span(role=role, text=text)],
        ground_truth=trajectory_pb2.GroundTruth(targets=targets),
    )


def build_router(name: str = "search_r1_format", **params: float | int | str | bool) -> RewardRouter:
    return RewardRouter({"world_facts": (RewardPart(name=name, params=params),)})


def test_training_and_validation_have_their_own_score() -> None:
    scored_item = build_router().score(build_item("<answer>Oslo</answer>"))
    assert scored_item.trajectory_id == "t"
    assert (scored_item.score.total, scored_item.score.reward) == (pytest.approx(0.8), "search_r1_format")
    assert (scored_item.validation_score.total, scored_item.validation_score.reward) == (1.0, "em")


def test_validation_ignores_the_weights_of_training() -> None:
    scored_item = build_router("em", format_score=0.5).score(build_item("<answer>Rome</answer>"))
    assert (scored_item.score.total, scored_item.validation_score.total) == (0.5, 0.0)


def test_parameters_of_a_route_reach_the_reward() -> None:
    score = build_router(score=10, structure_format_score=3).score(build_item("<answer>Oslo</answer>")).score
    assert score.total == 7.0
    assert [(part.name, part.raw, part.weighted) for part in score.components] == [
        ("exact_match", 1.0, 10.0),
        ("format", 0.0, -3.0),
    ]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (build_item("x", source="nq"), "'nq' has no route"),
        (build_item("x", source="World_Facts"), "'World_Facts' has no route"),
        (build_item("x", role=trajectory_pb2.ROLE_UNSPECIFIED), "span 0 has no known role"),
        (build_item("x", role=ENV), "nothing to score"),
        (
            reward_pb2.ScoreItem(data_source="world_facts", spans=build_item("x").spans, turns=[{}]),
            "turn 0 has no known action",
        ),
        (build_item("x", targets=()), "targets is empty"),
    ],
)
def test_an_invalid_item_gets_a_detail_and_no_score(bad: reward_pb2.ScoreItem, sentence: str) -> None:
    scored_item = build_router().score(bad)
    for score in (scored_item.score, scored_item.validation_score):
        assert score.status == trajectory_pb2.STATUS_INVALID_INPUT
        assert sentence in score.detail
        assert not score.components


@pytest.mark.parametrize(
    ("route", "sentence"),
    [
        ((RewardPart(name="exact"),), "reward.routes.nq asks for the reward 'exact'.*known are em, subem, f1"),
        (
            (RewardPart(name="em", params={"scale": 1.0}),),
            r"nq.params.scale does not exist.*format_score",
        ),
        ((RewardPart(name="em", params={"score": "1"}),), r"reward.routes.nq.params.score is '1'"),
        ((RewardPart(name="em", params={"score": True}),), r"reward.routes.nq.params.score is True"),
        ((RewardPart(name="em", params={"score": math.inf}),), r"reward.routes.nq.params.score is inf"),
    ],
)
def test_an_invalid_route_is_a_settings_error(route: tuple[RewardPart, ...], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        RewardRouter({"nq": route})


def test_every_reward_lists_its_data_sources() -> None:
    settings = RewardSettings(routes={"nq": (RewardPart(name="em"),), "world_facts": (RewardPart(name="em"),)})
    rewards = describe_rewards(registry.REWARDS, settings).rewards
    assert {reward.name: [use.data_source for use in reward.uses] for reward in rewards if reward.uses} == {
        "em": ["nq", "world_facts"],
    }


class NoParams(RewardParams):
    """None."""


def raise_error(view: TrajectoryView, truth: GroundTruth, params: NoParams) -> Score:
    raise RecursionError("too deep")


def answer_nowhere(view: TrajectoryView, truth: GroundTruth, params: NoParams) -> Score:
    return sum_components("faulty", (Component("c", math.nan, math.nan),), "not a number")


@pytest.mark.parametrize(
    ("function", "detail"), [(raise_error, "RecursionError: too deep"), (answer_nowhere, "total is nan")]
)
def test_a_reward_that_fails_is_internal_and_validation_is_unaffected(
    monkeypatch: pytest.MonkeyPatch, function: object, detail: str
) -> None:
    faulty = Reward("faulty", "fails", NoParams, function)  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "REWARDS", {**registry.REWARDS, "faulty": faulty})
    scored_item = build_router("faulty").score(build_item("<answer>Oslo</answer>"))
    assert scored_item.score.status == trajectory_pb2.STATUS_INTERNAL
    assert detail in scored_item.score.detail
    assert scored_item.validation_score.total == 1.0


@pytest.mark.parametrize(
    ("executed", "status", "want"),
    [
        (True, trajectory_pb2.STATUS_OK, 1.0),
        (False, trajectory_pb2.STATUS_OK, 0.0),
        (True, trajectory_pb2.STATUS_TIMEOUT, 0.0),
        (False, trajectory_pb2.STATUS_UNSPECIFIED, 0.0),
    ],
)
def test_a_turn_of_a_message_is_answered_when_its_retrieval_succeeded(
    executed: bool, status: trajectory_pb2.Status, want: float
) -> None:
    searching = build_item("<think>t</think><search>q</search>")
    searching.turns.add(
        index=1,
        action=trajectory_pb2.ACTION_KIND_SEARCH,
        content="q",
        executed=executed,
        retrieval_status=status,
    )
    score = build_router("structured").score(searching).score
    assert {part.name: part.raw for part in score.components}["_query_validity"] == want
