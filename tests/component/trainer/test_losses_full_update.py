"""A step of several updates by the real worker: every gradient against the objective written out in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from arrived_groups import arrive
from engine_updates import assert_same_gradients, record_updates, take_weights
from trainer_parts import PROMPT_TOKENS, build_trajectory, write_model

from forage_proto.v1.trajectory_pb2 import Trajectory, TrajectoryGroup
from forage_runtime.settings import load_settings
from forage_trainer.algorithms.estimators.grpo import grpo_outcome
from forage_trainer.data.tensors import build_step_tensors, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker

LOW, HIGH, DUAL, BETA, ENTROPY, SCALE = 0.05, 0.1, 1.3, 0.3, 0.02, 50
OPTIONS = [
    "trainer.threads=1",
    "trainer.actor.ppo_mini_batch_size=1",
    "trainer.actor.ppo_epochs=2",
    "trainer.actor.ppo_max_token_len_per_gpu=120",
    "trainer.actor.optim.lr=2e-3",
    "trainer.actor.optim.clip_grad=1e9",
    f"trainer.actor.clip_ratio={LOW}",
    f"trainer.actor.clip_ratio_high={HIGH}",
    f"trainer.actor.clip_ratio_c={DUAL}",
    f"trainer.actor.kl_loss_coef={BETA}",
    f"trainer.actor.entropy_coeff={ENTROPY}",
]


def forward(model: torch.nn.Module, row: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability, entropy) of each response token."""
    ids = torch.tensor([list(row.token_ids)])
    every = model(input_ids=ids).logits[0, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
    return every.gather(-1, ids[0, PROMPT_TOKENS:, None])[:, 0], -(every.exp() * every).sum(-1)


def compute_objective(
    model: torch.nn.Module, rows: list[Trajectory], known: dict[str, list[torch.Tensor]], agg: str, correction: str
) -> tuple[torch.Tensor, int]:
    """(loss of one mini-batch, tokens that were clipped)."""
    sums, tokens, clips = [], 0, 0
    for i, row in enumerate(rows):
        own, entropy = forward(model, row)
        old, engine, reference, mask, advantage = (known[n][i] for n in ("old", "engine", "reference", "mask", "adv"))
        ratio = (own - old).exp()
        clipped = ratio.clamp(1 - LOW, 1 + HIGH)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        gain = torch.where(advantage < 0, torch.maximum(gain, DUAL * advantage), gain)
        weight = (old - engine).exp()
        weight = weight.clamp(max=2.0) if correction == "tis" else weight * ((weight >= 0.5) & (weight <= 5.0))
        weight = torch.where(known["state"][i], weight, 1.0)
        log_ratio = reference - own
        k3 = (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)
        sums.append((-gain * weight - ENTROPY * entropy + BETA * k3)[mask].sum())
        tokens += int(mask.sum())
        clips += int(((clipped * advantage < ratio * advantage) & mask).sum())
    total = torch.stack(sums).sum()
    return total / (tokens if agg == "token-mean" else len(rows) * SCALE), clips


@pytest.mark.parametrize(
    ("agg", "correction", "state_masking"),
    [("token-mean", "tis", True), ("seq-mean-token-sum-norm", "icepop", False)],
)
def test_every_gradient_of_a_step_equals_plain_pytorch(
    tmp_path: Path, agg: str, correction: str, state_masking: bool
) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "model")
    chosen = [
        f"trainer.actor.loss_agg_mode={agg}",
        f"trainer.actor.loss_scale_factor={SCALE}",
        f"trainer.algorithm.rollout_correction.mode={correction}",
        f"trainer.algorithm.state_masking={state_masking}",
    ]
    settings = load_settings(None, [f"model.path={folder}", *OPTIONS, *chosen], {})
    algorithm = settings.trainer.algorithm
    groups = [
        TrajectoryGroup(
            group_uid=uid,
            position=position,
            trajectories=[
                build_trajectory(uid, i, float(i % 2), turns=(3 + i, 4 + 2 * i), observation=2 * i + 1)
                for i in range(4)
            ],
        )
        for position, uid in enumerate("ab")
    ]
    batch = build_step_tensors(select_trajectories(list(map(arrive, groups)), algorithm), 0, 1, 0, algorithm)
    assert batch is not None
    worker = PolicyWorker(settings)
    engine: Any = worker._actor.engine
    advantages = grpo_outcome(batch.token_rewards, batch.mask, batch.uids)
    old, reference = worker.log_probs(batch), worker.reference_log_probs(batch)
    assert reference is not None
    with record_updates(engine) as updates:
        worker.update(batch, advantages, reference, old, len(groups))
    assert len(updates) == 4

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    clips = 0
    for number, update in enumerate(updates):
        take_weights(model, update)
        places = [i for i, place in enumerate(batch.positions) if place == number % 2]
        rows = [groups[number % 2].trajectories[i % 4] for i in places]
        lengths = [len(row.loss_mask) for row in rows]
        padded = {
            "old": old,
            "engine": batch.engine_log_probs,
            "reference": reference,
            "mask": batch.mask.bool(),
            "state": batch.state.bool(),
            "adv": advantages,
        }
        known = {name: [matrix[i, :n] for i, n in zip(places, lengths, strict=True)] for name, matrix in padded.items()}
        loss, clipped = compute_objective(model, rows, known, agg, correction)
        loss.backward()
        clips += clipped
        assert_same_gradients(model, update)
        assert max(float(g.abs().max()) for g in update.gradients.values()) > 1e-2
    assert clips > 10
