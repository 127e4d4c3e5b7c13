"""One real verl worker on a random Qwen2, against plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arrived_groups import arrive
from engine_updates import assert_same_gradients, assert_same_step, read_parameters, record_updates, take_weights
from trainer_parts import PROMPT_TOKENS, build_trajectory, write_model

from forage_proto.v1.trajectory_pb2 import Trajectory, TrajectoryGroup
from forage_runtime.settings import AlgorithmSettings, Settings, load_settings
from forage_trainer.algorithms.estimators.grpo import grpo_outcome
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker, UpdateResult

LR, DECAY, CLIP = 1e-2, 0.1, 0.5
ALGORITHM = AlgorithmSettings()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = write_model(tmp_path_factory.mktemp("policy") / "model")
    optimizer = [f"trainer.actor.optim.{k}={v}" for k, v in (("lr", LR), ("weight_decay", DECAY), ("clip_grad", CLIP))]
    few = ["trainer.threads=1", "trainer.actor.ppo_max_token_len_per_gpu=120", "trainer.actor.kl_loss_coef=0.05"]
    return load_settings(None, [f"model.path={folder}", *optimizer, *few], {})


@pytest.fixture(scope="module")
def built(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> tuple[PolicyWorker, Path]:
    worker = PolicyWorker(settings)
    worker.save(tmp_path_factory.mktemp("start") / "state")
    return worker, next(tmp_path_factory.getbasetemp().glob("start*")) / "state"


@pytest.fixture
def worker(built: tuple[PolicyWorker, Path]) -> PolicyWorker:
    """The worker as it was built."""
    built[0].load(built[1])
    return built[0]


def build_groups(samples: int = 4) -> list[TrajectoryGroup]:
    sampled = [
        [
            build_trajectory(uid, i, float(i % 2), turns=(3 + i, 4 + 2 * i), observation=2 * i + 1)
            for i in range(samples)
        ]
        for uid in "ab"
    ]
    return [TrajectoryGroup(group_uid=uid, trajectories=result) for uid, result in zip("ab", sampled, strict=True)]


def flatten(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    return [t for g in groups for t in g.trajectories]


def build_tensors(groups: Sequence[TrajectoryGroup]) -> StepTensors:
    batch = build_step_tensors(select_trajectories(list(map(arrive, groups)), ALGORITHM), 0, 1, 0, ALGORITHM)
    assert batch is not None
    return batch


def take_step(
    worker: PolicyWorker, groups: Sequence[TrajectoryGroup], spend_a_pass: bool = False
) -> tuple[UpdateResult, dict[str, torch.Tensor]]:
    batch = build_tensors(groups)
    advantages = grpo_outcome(batch.token_rewards, batch.mask, batch.uids)
    old = worker.log_probs(batch) if spend_a_pass else None
    result = worker.update(batch, advantages, worker.reference_log_probs(batch), old, len(groups))
    return result, worker.weights(torch.float32)


def load_plain_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def compute_log_probs(model: torch.nn.Module, row: Trajectory) -> torch.Tensor:
    ids = torch.tensor([list(row.token_ids)])
    logits = model(input_ids=ids).logits / (row.sampling.temperature or 1.0)
    log_probs = logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    return log_probs[PROMPT_TOKENS - 1 :]


@pytest.mark.parametrize("temperatures", [(1.0,), (0.7,), (1.3,), (0.7, 1.0, 1.3), (0.0,)])
def test_log_probs_equal_those_of_a_plain_forward_at_the_temperature_of_each_row(
    worker: PolicyWorker, settings: Settings, temperatures: tuple[float, ...]
) -> None:
    groups = build_groups()
    for row, temperature in zip(flatten(groups), itertools.cycle(temperatures), strict=False):
        row.sampling.temperature = temperature
    batch = build_tensors(groups)
    result, reference, model = (
        worker.log_probs(batch),
        worker.reference_log_probs(batch),
        load_plain_model(settings.model.path),
    )
    assert reference is not None
    for i, row in enumerate(flatten(groups)):
        length = len(row.loss_mask)
        with torch.no_grad():
            expected = compute_log_probs(model, row)
        torch.testing.assert_close(result[i, :length], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(reference[i, :length], expected, atol=1e-5, rtol=0)
        assert not result[i, length:].any()


def test_entropies_equal_those_of_a_plain_forward_with_and_without_a_pass_of_their_own(
    worker: PolicyWorker, settings: Settings
) -> None:
    groups, model = build_groups(), load_plain_model(settings.model.path)
    for row, temperature in zip(flatten(groups), itertools.cycle((0.7, 1.0, 1.3)), strict=False):
        row.sampling.temperature = temperature
    batch = build_tensors(groups)
    log_probs, entropies = worker.log_probs_and_entropies(batch)
    torch.testing.assert_close(log_probs, worker.log_probs(batch))
    result, _ = take_step(worker, groups)
    assert result.entropies is not None
    for i, row in enumerate(flatten(groups)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([list(row.token_ids)])).logits[0, PROMPT_TOKENS - 1 : -1]
        scaled = logits.double().numpy() / row.sampling.temperature
        odds = np.exp(scaled - scaled.max(-1, keepdims=True))
        shares = odds / odds.sum(-1, keepdims=True)
        expected, length = -(shares * np.log(shares)).sum(-1), len(row.loss_mask)
        assert expected.min() > 0.1
        for found in (entropies, result.entropies):
            np.testing.assert_allclose(found[i, :length].numpy(), expected, atol=1e-4)
            assert not found[i, length:].any()
    inside = result.entropies[batch.mask.bool()]
    assert result.entropy == pytest.approx(float(inside.mean()), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_an_update_equals_plain_pytorch(worker: PolicyWorker, settings: Settings, temperature: float) -> None:
    """Two updates, so that the second has a policy that differs from the reference."""
    groups, model = build_groups(), load_plain_model(settings.model.path)
    for row in flatten(groups):
        row.sampling.temperature = temperature
    reference = load_plain_model(settings.model.path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, betas=(0.9, 0.999))
    trained: Any = worker._actor.engine
    for _ in range(2):
        with record_updates(trained) as updates:
            result, _ = take_step(worker, groups)
        [update] = updates
        take_weights(model, update)
        loss, tokens = torch.zeros(()), 0
        for row in flatten(groups):
            mask, engine = torch.tensor(list(row.loss_mask)).bool(), torch.tensor(list(row.logprobs))
            own = compute_log_probs(model, row)
            with torch.no_grad():
                log_ratio = compute_log_probs(reference, row) - own
                weight = (own - engine).exp().clamp(max=2.0)
            log_ratio = log_ratio.detach() + own.detach() - own
            advantage = (row.score.total - 0.5) / (torch.tensor([0.0, 1.0] * 2).std() + 1e-6)
            surrogate = -advantage * weight * (own - own.detach()).exp()
            loss = loss + (surrogate + 0.05 * (log_ratio.exp() - log_ratio - 1).clamp(-10, 10))[mask].sum()
            tokens += int(mask.sum())
        (loss / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert result.loss == pytest.approx(float(loss.detach()) / tokens, abs=1e-5)
        assert_same_gradients(model, update)
        assert_same_step(model, optimizer, update, read_parameters(trained))


def test_values_on_observation_tokens_do_not_change_the_update(
    worker: PolicyWorker, built: tuple[PolicyWorker, Path]
) -> None:
    groups = build_groups()
    _, expected = take_step(worker, groups)
    for row in flatten(groups):
        row.logprobs[:] = [p if m else -3.0 for p, m in zip(row.logprobs, row.loss_mask, strict=True)]
    worker.load(built[1])
    _, result = take_step(worker, groups)
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_the_updates_own_forward_pass_equals_a_separate_one_for_old_log_probs(
    worker: PolicyWorker, built: tuple[PolicyWorker, Path]
) -> None:
    with record_updates(worker._actor.engine) as updates:
        own, _ = take_step(worker, build_groups())
        worker.load(built[1])
        spent, _ = take_step(worker, build_groups(), spend_a_pass=True)
    torch.testing.assert_close(own.log_probs, spent.log_probs, atol=1e-5, rtol=0)
    expected, result = (update.gradients for update in updates)
    for name in expected:
        torch.testing.assert_close(result[name], expected[name], atol=1e-5, rtol=1e-4)


def test_a_resumed_worker_takes_the_same_next_step(worker: PolicyWorker, tmp_path: Path) -> None:
    take_step(worker, build_groups())
    worker.save(tmp_path / "state")
    _, expected = take_step(worker, build_groups())
    worker.load(tmp_path / "state")
    _, result = take_step(worker, build_groups())
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_weights_are_a_model_that_transformers_loads(worker: PolicyWorker, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    take_step(worker, build_groups())
    weights = worker.weights(torch.float32)
    assert "lm_head.weight" not in weights
    assert {w.dtype for w in weights.values()} == {torch.float32}
    assert sum(w.numel() for w in weights.values()) == worker.parameters
    write_model(tmp_path / "again")
    save_file(weights, tmp_path / "again/model.safetensors", metadata={"format": "pt"})
    model = load_plain_model(tmp_path / "again")
    batch = build_tensors(build_groups())
    with torch.no_grad():
        expected = compute_log_probs(model, flatten(build_groups())[3])
    torch.testing.assert_close(worker.log_probs(batch)[3, : len(expected)], expected, atol=1e-5, rtol=0)


def test_a_worker_that_gave_its_memory_away_takes_the_same_step(built: tuple[PolicyWorker, Path]) -> None:
    """On a CPU nothing moves; verl's functions are called all the same, for the reference, too."""
    worker, state = built
    after = []
    for is_moved in (False, True):
        worker.load(state)
        if is_moved:
            assert worker.move_to_host() == 0
            worker.move_to_gpu()
        _, weights = take_step(worker, build_groups())
        after.append(weights)
    assert after[0].keys() == after[1].keys()
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])
