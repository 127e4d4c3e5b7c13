"""User rewards: valid results of their function, and functions that hang, crash or exhaust memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward.deadline import DEADLINE
from forage_reward.isolation.user_rewards import UserPool, UserRewards
from forage_reward.registry import REWARDS
from forage_reward.router import RewardRouter
from forage_reward.trajectory import Action, GroundTruth, Role, Span, TrajectoryView, Turn
from forage_reward.wire import build_item, read_truth, read_view
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RewardPart, UserReward

REPOSITORY = Path(__file__).resolve().parents[3]
CODE = REPOSITORY / "tests/data/reward/user_reward.py"
OK, INTERNAL, TIMEOUT = trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_INTERNAL, trajectory_pb2.STATUS_TIMEOUT


@pytest.fixture(scope="module")
def router() -> Iterator[RewardRouter]:
    user = UserRewards({"mine": UserReward(function=f"{CODE}:score", timeout_s=300.0, memory_mib=256)}, REWARDS)
    parts = (RewardPart(name="em"), RewardPart(name="mine", weight=2.0))
    routes = {"a": (RewardPart(name="mine", params={"extra": 0.25}),), "both": parts}
    yield RewardRouter(routes, user.rewards)
    user.close()


def score_order(router: RewardRouter, order: str, source: str = "a") -> trajectory_pb2.Score:
    item = reward_pb2.ScoreItem(
        trajectory_id="t",
        data_source=source,
        spans=[trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text=f"<answer>{order}</answer>")],
        ground_truth=trajectory_pb2.GroundTruth(targets=[order]),
    )
    return router.score(item).score


def test_a_dict_becomes_components_and_their_sum_without_those_for_logs(router: RewardRouter) -> None:
    score = score_order(router, "value")
    assert (score.status, score.total, score.reward) == (OK, 1.75, "mine")
    assert [(part.name, part.raw, part.weighted) for part in score.components] == [
        ("right", 1.0, 1.0),
        ("half", 0.5, 0.5),
        ("_log", 7.0, 0.0),
        ("param", 0.25, 0.25),
    ]


def test_a_bool_is_a_score(router: RewardRouter) -> None:
    score = score_order(router, "bool")
    assert (score.status, score.total) == (OK, 1.0)


def test_a_user_reward_may_be_part_of_a_composition(router: RewardRouter) -> None:
    assert score_order(router, "number", "both").total == 1.0 + 2.0 * 3.0
    assert score_order(router, "none", "both").status == INTERNAL


@pytest.mark.parametrize(
    ("order", "status", "sentence"),
    [
        ("none", INTERNAL, "returned a NoneType as value"),
        ("text", INTERNAL, "returned a str as value"),
        ("list", INTERNAL, "returned a list as value"),
        ("nan", INTERNAL, "returned nan as value"),
        ("inf", INTERNAL, "returned inf as value"),
        ("raise", INTERNAL, "raised RuntimeError: no such thing"),
        ("quit", INTERNAL, "raised SystemExit: 0"),
        ("exit", INTERNAL, "ended with exit code 7"),
        ("segfault", INTERNAL, "was killed by SIGSEGV"),
        ("memory", INTERNAL, "it needs more memory than memory_mib=256"),
    ],
)
def test_a_failure_is_a_status_and_the_next_call_is_answered(
    router: RewardRouter, order: str, status: int, sentence: str
) -> None:
    score = score_order(router, order)
    assert (score.status, score.total, len(score.components)) == (status, 0.0, 0)
    assert sentence in score.detail
    after = score_order(router, "number")
    assert (after.status, after.total) == (OK, 3.0)


@pytest.mark.parametrize("order", ["hang", "spin"])
def test_a_call_that_takes_too_long_is_a_timeout_and_its_process_is_replaced(order: str) -> None:
    user = UserRewards({"mine": UserReward(function=f"{CODE}:score", timeout_s=0.5)}, REWARDS)
    hurried = RewardRouter({"a": (RewardPart(name="mine"),)}, user.rewards)
    score = score_order(hurried, order)
    assert (score.status, score.total, len(score.components)) == (TIMEOUT, 0.0, 0)
    assert "its process is killed and started again" in score.detail
    wait_until(lambda: score_order(hurried, "number").status == OK)
    user.close()


def test_output_of_the_function_does_not_disturb_the_protocol(router: RewardRouter) -> None:
    assert score_order(router, "print").total == 1.0


def test_the_function_runs_in_another_process_which_ends_with_the_pool() -> None:
    user = UserRewards({"mine": UserReward(function=f"{CODE}:score")}, REWARDS)
    pid = int(score_order(RewardRouter({"a": (RewardPart(name="mine"),)}, user.rewards), "pid").total)
    assert pid != os.getpid()
    user.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_call_waits_no_longer_than_the_deadline_of_its_request(router: RewardRouter) -> None:
    token = DEADLINE.set(time.monotonic() - 1.0)
    try:
        assert score_order(router, "number").status == TIMEOUT
    finally:
        DEADLINE.reset(token)
    assert score_order(router, "number").status == OK


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (UserReward(function="/nowhere/reward.py:score"), "not a Python file"),
        (UserReward(function=f"{CODE}:other"), "has no 'other'"),
        (UserReward(function="no_such_package:score"), "ModuleNotFoundError"),
        (UserReward(function="unknown"), "no installed package has 'unknown' in forage.rewards"),
        (UserReward(function="os:name"), "'os:name' is 'posix': expected a function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_settings_error(settings: UserReward, sentence: str) -> None:
    with pytest.raises(SettingsError, match=r"reward.user.mine: ") as caught:
        UserPool("mine", settings)
    assert sentence in str(caught.value)


def test_the_name_of_a_built_in_reward_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"reward.user.em has the name of a built-in"):
        UserRewards({"em": UserReward(function=f"{CODE}:score")}, REWARDS)


def test_the_example_of_the_documentation_scores() -> None:
    user = UserRewards({"short": UserReward(function=f"{REPOSITORY}/examples/rewards/short_answer.py:score")}, REWARDS)
    router = RewardRouter({"a": (RewardPart(name="short", params={"penalty": 0.5}),)}, user.rewards)
    scores = {answer: score_order(router, answer).total for answer in ("Oslo", "The Hague")}
    assert scores == {"Oslo": 1.0, "The Hague": 1.0}
    item = reward_pb2.ScoreItem(
        data_source="a",
        spans=[trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text="<answer>in Oslo I think</answer>")],
        ground_truth=trajectory_pb2.GroundTruth(targets=["Oslo"]),
    )
    assert router.score(item).score.total == -1.5
    user.close()


@pytest.mark.parametrize(
    "truth", [GroundTruth(("a", "b")), GroundTruth((), 24, (1, 2, 3)), GroundTruth((), 0, ()), GroundTruth()]
)
def test_a_view_survives_the_conversion_to_a_message_and_back(truth: GroundTruth) -> None:
    spans = (Span(Role.PROMPT, "p"), Span(Role.MODEL, "m\0"), Span(Role.ENV, ""), Span(Role.MODEL, "é\U0001f642"))
    turns = (Turn(Action.SEARCH, "q", True), Turn(Action.SEARCH, "q", False), Turn(Action.ANSWER, "a"))
    view = TrajectoryView(spans, "</s>", turns)
    item = build_item(view, truth)
    assert (read_view(item), read_truth(item)) == (view, truth)
