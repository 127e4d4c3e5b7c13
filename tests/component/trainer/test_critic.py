"""The critic on a random Qwen2, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from arrived_groups import arrive
from engine_updates import assert_same_gradients, assert_same_step, read_parameters, record_updates
from trainer_parts import PROMPT_TOKENS, build_trajectory, write_model

from forage_proto.v1.trajectory_pb2 import Trajectory, TrajectoryGroup
from forage_runtime.settings import AlgorithmSettings, Settings, load_settings
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker

LR, DECAY, CLIP, RANGE = 1e-2, 0.1, 0.5, 0.05
ALGORITHM = AlgorithmSettings()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = write_model(tmp_path_factory.mktemp("critic") / "model")
    optimizer = [f"trainer.actor.optim.{k}={v}" for k, v in (("weight_decay", DECAY), ("clip_grad", CLIP))]
    optimizer += [f"trainer.critic.optim.lr={LR}"]
    few = ["trainer.threads=1", "trainer.actor.ppo_max_token_len_per_gpu=120", "trainer.actor.use_kl_loss=false"]
    ppo = ["trainer.algorithm.adv_estimator=gae", f"trainer.critic.cliprange_value={RANGE}"]
    return load_settings(None, [f"model.path={folder}", *optimizer, *few, *ppo], {})


@pytest.fixture(scope="module")
def worker(settings: Settings) -> PolicyWorker:
    return PolicyWorker(settings)


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    return [
        build_trajectory(uid, i, float(i % 2), turns=(3 + i, 4 + 2 * i), observation=2 * i + 1)
        for uid in "ab"
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def batch(trajectories: list[Trajectory]) -> StepTensors:
    groups = [TrajectoryGroup(group_uid=uid, trajectories=trajectories[i : i + 4]) for i, uid in ((0, "a"), (4, "b"))]
    result = build_step_tensors(select_trajectories(list(map(arrive, groups)), ALGORITHM), 0, 1, 0, ALGORITHM)
    assert result is not None
    return result


def compute_plain_values(model: torch.nn.Module, row: Trajectory) -> torch.Tensor:
    """V of each response token, from what came before it."""
    return model(input_ids=torch.tensor([list(row.token_ids)])).logits[0, PROMPT_TOKENS - 1 : -1, 0]


def test_values_start_at_zero_and_updates_equal_plain_pytorch(
    worker: PolicyWorker, settings: Settings, batch: StepTensors, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    """Three updates: the second has values that are clipped, the third is taken again after a resume."""
    from transformers import AutoModelForTokenClassification

    assert not worker.values(batch).any()
    model = AutoModelForTokenClassification.from_pretrained(settings.model.path, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, betas=(0.9, 0.999))
    torch.manual_seed(3)
    # Returns of tokens that are not trained on must not count.
    returns = torch.where(batch.mask.bool(), torch.randn_like(batch.mask), 100.0)
    policy = worker.weights(torch.float32)
    engine: Any = worker._critic.worker.engine  # type: ignore[union-attr]
    clipped = 0
    for number in range(3):
        values = worker.values(batch) - 0.04 * number
        with torch.no_grad():
            for i, row in enumerate(trajectories):
                expected = compute_plain_values(model, row)
                torch.testing.assert_close(values[i, : len(expected)] + 0.04 * number, expected, atol=2e-5, rtol=1e-5)
        if number == 2:
            worker.save(tmp_path / "state")
        with record_updates(engine) as updates:
            metrics = worker.update_critic(batch, values, returns, 2)
        loss = torch.zeros(())
        for i, row in enumerate(trajectories):
            new, mask = compute_plain_values(model, row), torch.tensor(list(row.loss_mask)).bool()
            old, target = values[i, : len(new)], returns[i, : len(new)]
            near = torch.minimum(torch.maximum(new, old - RANGE), old + RANGE)
            squares = torch.maximum((new - target) ** 2, (near - target) ** 2)
            clipped += int((((near - target) ** 2 > (new - target) ** 2) & mask).sum())
            loss = loss + 0.5 * squares[mask].sum()
        loss = loss / batch.mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert metrics["critic/vf_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert metrics["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        [update] = updates
        assert_same_gradients(model, update)
        assert_same_step(model, optimizer, update, read_parameters(engine))
        assert metrics["critic/lr"] == pytest.approx(LR)
    assert clipped > 10
    assert metrics["critic/vf_clipfrac"] > 0
    assert (tmp_path / "state/critic").is_dir()
    expected = worker.values(batch)
    worker.load(tmp_path / "state")
    assert not torch.equal(worker.values(batch), expected)
    worker.update_critic(batch, values, returns, 2)
    assert torch.equal(worker.values(batch), expected)
    assert all(torch.equal(policy[name], tensor) for name, tensor in worker.weights(torch.float32).items())


def test_a_value_model_keeps_its_head(settings: Settings, batch: StepTensors, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(5)
    model = AutoModelForTokenClassification.from_pretrained(settings.model.path, num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "value")
    more = ["trainer.algorithm.adv_estimator=gae", "trainer.actor.use_kl_loss=false", "trainer.threads=1"]
    worker = PolicyWorker(
        load_settings(
            None, [f"model.path={settings.model.path}", f"trainer.critic.path={tmp_path / 'value'}", *more], {}
        )
    )
    rows = batch.data["input_ids"].unbind()
    with torch.no_grad():
        expected = model.eval()(input_ids=rows[2].unsqueeze(0)).logits[0, PROMPT_TOKENS - 1 : -1, 0]
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(worker.values(batch)[2, : len(expected)], expected, atol=1e-5, rtol=0)


def test_without_gae_there_is_no_critic(settings: Settings, batch: StepTensors) -> None:
    few = [f"model.path={settings.model.path}", "trainer.threads=1", "trainer.actor.use_kl_loss=false"]
    with pytest.raises(ValueError, match="adv_estimator is not gae"):
        PolicyWorker(load_settings(None, few, {})).values(batch)
