"""Metrics of a step that follow from trajectories and tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from arrived_groups import arrive
from trainer_parts import build_trajectory, make_group

from forage_proto.v1.trajectory_pb2 import ActionKind, GroundTruth, Score, Status, Trajectory, TrajectoryGroup
from forage_records.questions import Question
from forage_records.trajectory_rows import build_record
from forage_trainer.reporting.metrics import compute_estimate_metrics, compute_trajectory_metrics, to_verl_names
from forage_trainer.validation.results import summarize

DATA = Path(__file__).parents[2] / "data/trainer/loss_mask.jsonl"


@pytest.mark.parametrize("example", [json.loads(line) for line in DATA.read_text().splitlines()])
def test_state_tokens_follow_the_specification(example: dict[str, Any]) -> None:
    rows = [
        Trajectory(
            status=Status.STATUS_OK,
            score=Score(status=Status.STATUS_OK),
            prompt_length=2,
            token_ids=[5] * (2 + sum(within)),
            loss_mask=own[: sum(within)],
            turn_ids=[1 if one else -1 for one in own[: sum(within)]],
            logprobs=[0.0] * sum(within),
        )
        for own, within in zip(example["state"], example["response"], strict=True)
    ]
    metrics = to_verl_names(compute_trajectory_metrics([arrive(TrajectoryGroup(trajectories=rows))], 0))
    assert metrics["state_tokens/total"] == example["total"]
    assert metrics["state_tokens/coverage"] == example["coverage"]


def test_both_sums_of_a_score_with_turns_are_reported() -> None:
    row = build_trajectory("a", 0, 0.45)
    row.turn_ids[:] = [1] * 6 + [-1] * 7 + [2] * 5
    for turn, earned in ((1, 0.2), (2, 0.1)):
        row.score.components.add(name=f"turn_{turn}", raw=earned, weighted=earned / 2)
    row.score.components.add(name="exact_match", raw=1.0, weighted=0.3)
    metrics = compute_trajectory_metrics([arrive(TrajectoryGroup(trajectories=[row]))], 0)
    assert metrics["reward_mean"] == pytest.approx(0.45)
    assert metrics["reward_turn_sum_mean"] == pytest.approx(0.6)


def test_searches_are_those_that_were_carried_out() -> None:
    """One trajectory searches once within rollout.max_turns and once beyond, the other beyond alone."""
    rows = []
    for sample, executed in enumerate(((True, False), (False,))):
        row = build_trajectory("a", sample, 0.0)
        row.valid_searches = len(executed)
        for is_executed in executed:
            row.turns.add(action=ActionKind.ACTION_KIND_SEARCH, content="q", executed=is_executed)
        rows.append(row)
    metrics = compute_trajectory_metrics([arrive(TrajectoryGroup(trajectories=rows))], 0)
    assert [metrics[name] for name in ("search_rate", "searches_mean", "searches_beyond_limit_mean")] == [0.5, 0.5, 1.0]
    question = Question("nq", "test", 0, (), GroundTruth(targets=["it"]), "Who?")
    assert summarize([question] * 2, dict(enumerate(rows)), 0)["search_rate"] == 0.5
    records = [build_record(question, row, "") for row in rows]
    assert [(one["searches"], one["searches_beyond_limit"]) for one in records] == [(1, 1), (0, 1)]


def test_components_add_up_to_the_mean_reward_and_sources_have_an_exact_match_of_their_own() -> None:
    one, other, failed = (build_trajectory("a", number, 0.0) for number in range(3))
    for row, parts, em, source in (
        (one, {"format": 0.2, "answer": 0.8}, 1.0, "nq"),
        (other, {"format": 0.1}, 0.0, "hotpot"),
    ):
        del row.score.components[:]
        for name, weighted in parts.items():
            row.score.components.add(name=name, raw=9.0, weighted=weighted)
        row.score.total, row.data_source = sum(parts.values()), source
        row.validation_score.CopyFrom(Score(status=Status.STATUS_OK, total=em))
    failed.status = Status.STATUS_TIMEOUT
    metrics = compute_trajectory_metrics([arrive(TrajectoryGroup(trajectories=[one, other, failed]))], 0)
    assert metrics["reward/format"] == pytest.approx(0.15)
    assert metrics["reward/answer"] == pytest.approx(0.4)
    assert metrics["reward_mean"] == pytest.approx(0.55)
    assert (metrics["em/nq"], metrics["em/hotpot"], metrics["em_mean"]) == (1.0, 0.0, 0.5)
    nothing = compute_trajectory_metrics([arrive(TrajectoryGroup(trajectories=[failed]))], 0)
    assert not [name for name in nothing if name.startswith(("reward/", "em/"))]


def test_rows_without_state_tokens_are_counted() -> None:
    rows = make_group("a", [0.0, 1.0])
    rows.trajectories.append(build_trajectory("a", 2, 1.0, turns=()))
    assert compute_trajectory_metrics([arrive(rows)], 0)["without_state_tokens"] == 1


def test_metrics_of_the_estimate_are_over_tokens_of_the_mask() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    junk = torch.where(mask == 0, float("nan"), 0.0)
    advantages = torch.tensor([[1.0, 0.0, 2.0], [-3.0, -1.0, 0.0]]) + junk
    rewards, values = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]) + junk, torch.full((2, 3), 0.5) + junk
    result = compute_estimate_metrics(rewards, advantages, advantages, values, mask)
    assert result["advantage_abs_mean"] == 1.75
    assert result["critic/advantages/mean"] == -0.25
    assert (result["critic/advantages/max"], result["critic/advantages/min"]) == (2.0, -3.0)
    assert result["critic/rewards/mean"] == 0.75
    assert result["critic/values/max"] == 0.5
    # A constant explains nothing of the returns' variance.
    assert result["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-4)


def test_without_a_critic_there_are_no_metrics_of_it() -> None:
    ones = torch.ones(2, 2)
    result = compute_estimate_metrics(ones, ones, ones, None, ones)
    assert not [name for name in result if "value" in name or "vf_" in name]
