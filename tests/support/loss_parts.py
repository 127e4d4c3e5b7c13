"""A batch with random values, and the actor's loss of it as an engine calls it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from arrived_groups import arrive
from tensordict import TensorDict
from trainer_parts import PROMPT_TOKENS, build_trajectory
from verl.utils import tensordict_utils as tu

from forage_proto.v1.trajectory_pb2 import TrajectoryGroup
from forage_runtime.settings import ActorSettings, AlgorithmSettings, CorrectionSettings
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories
from forage_trainer.engine.actor_loss import ActorLoss, build_actor_config

SCALE = 40
Matrices = dict[str, np.ndarray]


def build_batch(state_masking: bool = True) -> StepTensors:
    rows = [build_trajectory("a", i, float(i % 2), turns=(2 + i, 3 + i), observation=i + 1) for i in range(4)]
    algorithm = AlgorithmSettings(state_masking=state_masking)
    chosen = select_trajectories([arrive(TrajectoryGroup(trajectories=rows))], algorithm)
    result = build_step_tensors(chosen, 0, 1, 0, algorithm)
    assert result is not None
    return result


def draw_matrices(tensors: StepTensors, seed: int = 0) -> Matrices:
    """Log-probabilities far enough apart that every clip is met; float32, as the loss sees them."""
    numbers, shape = np.random.default_rng(seed), tensors.mask.shape
    own = -numbers.uniform(0.1, 3, shape)
    matrices = {
        "own": own,
        "old": own + numbers.normal(0, 0.8, shape),
        "engine": own + numbers.normal(0, 1.2, shape),
        "reference": own + numbers.normal(0, 1, shape),
        "entropy": numbers.uniform(0, 3, shape),
        "advantages": numbers.normal(0, 1, shape),
        "values": numbers.normal(0, 1, shape),
        "predicted": numbers.normal(0, 1.5, shape),
        "returns": numbers.normal(0, 1, shape),
    }
    return {name: value.astype(np.float32) for name, value in matrices.items()}


def lay_out_prediction(tensors: StepTensors, matrix: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
    """The layout of a model's output: jagged as the input, with a response token's value at the token before it."""
    values = [
        torch.cat([torch.zeros(PROMPT_TOKENS - 1), matrix[row, : tensors.responses[row]], torch.zeros(1)])
        for row in (range(len(tensors)) if rows is None else rows)
    ]
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def describe_batch(data: TensorDict, tensors: StepTensors) -> TensorDict:
    """The engine's description of the mini-batch that a micro-batch belongs to."""
    tokens, rows = float(tensors.mask.sum()), len(tensors.uids)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=rows)
    return data


def run_actor_loss(
    tensors: StepTensors,
    given_: Matrices,
    actor: ActorSettings,
    correction: CorrectionSettings,
    rows: Sequence[int] | None = None,
    own: torch.Tensor | None = None,
) -> torch.Tensor:
    names = {"advantages": "advantages", "old_log_probs": "old", "ref_log_prob": "reference"}
    names["rollout_log_probs"] = "engine"
    values = {name: torch.tensor(given_[source]) for name, source in names.items()}
    data = tensors.build(range(len(tensors)) if rows is None else rows, values)
    output = {
        "log_probs": lay_out_prediction(tensors, torch.tensor(given_["own"]) if own is None else own, rows),
        "entropy": lay_out_prediction(tensors, torch.tensor(given_["entropy"]), rows),
    }
    loss, _ = ActorLoss(build_actor_config(actor, 4), correction)(output, describe_batch(data, tensors))
    return loss


def aggregate(tokens: np.ndarray, mask: np.ndarray, mode: str) -> float:
    tokens = np.where(mask == 1, tokens, 0.0)
    if mode == "token-mean":
        return float(tokens.sum() / mask.sum())
    rows = tokens.sum(1) / (mask.sum(1) if mode == "seq-mean-token-mean" else 1)
    return float(rows.mean() / (SCALE if mode == "seq-mean-token-sum-norm" else 1))
