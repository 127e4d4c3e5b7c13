"""The log-probabilities that are published with a policy are those of its weights, of any number of prompts."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import spmd_process
import torch
from arrived_groups import arrive
from trainer_parts import write_model
from transformers import AutoModelForCausalLM

from forage_proto.v1.trajectory_pb2 import Canary, Policy, Trajectory, TrajectoryGroup
from forage_runtime.settings import Settings, load_settings
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.weights.publication import Snapshots
from forage_trajectory.trajectory import Group
from forage_weights.announcement import CANARY_ROWS, CANARY_TOKENS, check_canary
from forage_weights.rollout.canary import CanaryBounds

OPENINGS = [[5, 6, 7, 8], [9] * 100, [11, 12]]
TURN = [21, 22, 23, 24, 25]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("snapshots") / "model")


@pytest.fixture(scope="module")
def settings(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("runs")
    return load_settings(None, [f"model.path={model}", f"run.dir={folder}", "trainer.threads=1"], {})


@pytest.fixture(scope="module")
def worker(settings: Settings) -> PolicyWorker:
    return PolicyWorker(settings)


def apply_overrides(settings: Settings, *overrides: str) -> Settings:
    return load_settings(None, [f"model.path={settings.model.path}", f"run.dir={settings.run.dir}", *overrides], {})


def open_snapshots(settings: Settings, worker: Any, openings: list[list[int]]) -> Snapshots:
    return Snapshots(settings, worker, lambda: "float32", nullcontext, openings, 0)


def take_canary(snapshots: Snapshots) -> Canary:
    _, canary = snapshots.take()
    assert canary is not None
    return canary


def make_group(tokens: list[int], mask: list[int]) -> Group:
    turns = [1 if one else -1 for one in mask]
    one = Trajectory(
        token_ids=[1, 2, *tokens],
        prompt_length=2,
        loss_mask=mask,
        turn_ids=turns,
        logprobs=[-1.0 if one else 0.0 for one in mask],
    )
    return arrive(TrajectoryGroup(trajectories=[one]))


def test_they_are_a_plain_forward_pass_over_the_ends_of_prompts(
    settings: Settings, worker: PolicyWorker, model: Path
) -> None:
    canary = take_canary(open_snapshots(settings, worker, OPENINGS))
    assert canary.dtype == "float32"
    assert [list(row.token_ids) for row in canary.rows] == [OPENINGS[0], [9] * CANARY_TOKENS, OPENINGS[2]]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row in canary.rows:
        tokens = torch.tensor([list(row.token_ids)])
        with torch.no_grad():
            scores = torch.log_softmax(plain(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
        assert torch.allclose(torch.tensor(list(row.logprobs)), scores, atol=1e-5)


@pytest.mark.parametrize("published", ["float16", "bfloat16"])
def test_weights_that_are_published_in_a_coarser_type_are_within_its_bound(
    settings: Settings, worker: PolicyWorker, model: Path, published: str
) -> None:
    coarser = apply_overrides(settings, f"trainer.publish.dtype={published}")
    weights, canary = open_snapshots(coarser, worker, OPENINGS).take()
    assert canary is not None
    assert canary.dtype == published
    engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    engine.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    with torch.no_grad():
        differences = [
            torch.log_softmax(engine(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
            - torch.tensor(list(row.logprobs))
            for row in canary.rows
            for tokens in [torch.tensor([list(row.token_ids)])]
        ]
    assert 0 < torch.cat(differences).abs().mean() < CanaryBounds("float32").find(canary, is_fresh=False)


def test_there_are_at_most_four_rows_that_an_engine_takes(settings: Settings, worker: PolicyWorker) -> None:
    snapshots = open_snapshots(settings, worker, [[3] * 70, [4]] + [[5, 6]] * 9)
    snapshots.add_turn([make_group(TURN * 20, [1] * 100)])
    weights, canary = snapshots.take()
    assert weights
    assert canary is not None
    assert len(canary.rows) <= CANARY_ROWS
    check_canary(Policy(canary=canary), 64)


def test_the_first_turn_that_was_sampled_becomes_a_row_and_stays_it(settings: Settings, worker: PolicyWorker) -> None:
    snapshots = open_snapshots(settings, worker, OPENINGS)
    snapshots.add_turn([make_group([30, 31], [0, 0])])  # nothing was sampled
    assert len(take_canary(snapshots).rows) == len(OPENINGS)
    snapshots.add_turn([make_group([30, *TURN, 31], [0, *[1] * len(TURN), 0])])
    snapshots.add_turn([make_group([40, 41], [1, 1])])
    assert list(take_canary(snapshots).rows[-1].token_ids) == TURN


def test_without_prompts_nothing_is_published(settings: Settings, worker: PolicyWorker) -> None:
    snapshots = open_snapshots(settings, worker, [])
    snapshots.add_turn([make_group(TURN, [1] * len(TURN))])
    assert snapshots.take()[1] is None


def test_to_score_them_changes_nothing_that_is_trained(model: Path) -> None:
    trained = []
    for openings in ([], OPENINGS):
        settings = spmd_process.build_settings(model)
        one = PolicyWorker(settings)
        batch = spmd_process.build_rows(settings)
        snapshots, advantages = open_snapshots(settings, one, openings), batch.mask * 0.5
        for _ in range(2):
            old, reference = one.log_probs(batch), one.reference_log_probs(batch)
            one.update(batch, advantages, reference, old, 2)
            weights, _ = snapshots.take()
        trained.append((weights, torch.get_rng_state()))
    (without, random), (with_canary, random_too) = trained
    assert without.keys() == with_canary.keys()
    assert all(torch.equal(tensor, with_canary[name]) for name, tensor in without.items())
    assert torch.equal(random, random_too)


def test_where_the_policy_is_no_number_none_are_published(settings: Settings, worker: PolicyWorker) -> None:
    class Broken:
        dtype = "float32"
        weights, adapter = worker.weights, worker.adapter

        @staticmethod
        def log_probs(batch: Any) -> torch.Tensor:
            return torch.full(batch.shape, math.nan)

    assert open_snapshots(settings, Broken(), OPENINGS).take()[1] is None
