"""Trajectory groups → the tensors of one optimizer step.

Two layouts side by side: verl's no-padding TensorDict (jagged, for the engine), and padded (rows, tokens) matrices over
the response (for estimators and metrics). Only rows that take part in the step are in either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from forage_common.v1.trajectory_pb2 import Status, Trajectory, TrajectoryGroup
from forage_trainer.advantages import participation


@dataclass(frozen=True)
class StepTensors:
    """What one optimizer step is computed from.

    data: jagged `input_ids`, `position_ids`, `prompts`, `responses`, `response_mask`, `loss_mask`,
        `rollout_log_probs`, and `row` (rows,), the row's number.
    mask, token_rewards, engine_log_probs: (rows, tokens) float32 over the response, 0 beyond its end.
    current: (rows, tokens) bool, state tokens sampled under exactly the policy that is being trained.
    uids: group of each row; positions: its place within the batch.
    rows: trajectories seen; dead_groups: groups with fewer than two valid rows.
    """

    data: TensorDict
    mask: torch.Tensor
    token_rewards: torch.Tensor
    engine_log_probs: torch.Tensor
    current: torch.Tensor
    uids: tuple[str, ...]
    positions: tuple[int, ...]
    rows: int
    dead_groups: int


def is_valid(trajectory: Trajectory) -> bool:
    """Whether a trajectory may enter loss and baseline: no failure anywhere, and at least one state token."""
    return (
        trajectory.status == Status.STATUS_OK
        and trajectory.score.status == Status.STATUS_OK
        and trajectory.prompt_length > 0
        and 1 in trajectory.loss_mask
    )


def step_tensors(
    groups: Sequence[TrajectoryGroup], version: int, epoch: int, pad_id: int
) -> tuple[StepTensors | None, int]:
    """(tensors, dead groups); None for the tensors if no row takes part.

    Args:
        version, epoch: of the policy that is being trained.
        pad_id: token id for padding inside the engine.
    """
    rows = [(place, t) for place, group in enumerate(groups) for t in group.trajectories]
    uids = [groups[place].group_uid for place, _ in rows]
    taking_part = participation(uids, torch.tensor([is_valid(t) for _, t in rows], dtype=torch.bool))
    # A group that came back empty has no rows to be counted by.
    dead = taking_part.dead_groups + sum(not group.trajectories for group in groups)
    used = [row for row, use in zip(rows, taking_part.used.tolist(), strict=True) if use]
    if not used:
        return None, dead
    trajectories = [t for _, t in used]
    responses = [list(t.token_ids[t.prompt_length :]) for t in trajectories]
    masks = [list(t.loss_mask) for t in trajectories]
    log_probs = [list(t.logprobs) for t in trajectories]
    data = tu.get_tensordict(
        {
            "input_ids": _jagged([list(t.token_ids) for t in trajectories], torch.long),
            "position_ids": _jagged([range(len(t.token_ids)) for t in trajectories], torch.long),
            "prompts": _jagged([list(t.token_ids[: t.prompt_length]) for t in trajectories], torch.long),
            "responses": _jagged(responses, torch.long),
            "response_mask": _jagged(masks, torch.float32),
            "loss_mask": _jagged(masks, torch.float32),
            "rollout_log_probs": _jagged(log_probs, torch.float32),
            "row": torch.arange(len(trajectories)),
        },
        # Log-probabilities are those of temperature 1 on both sides.
        non_tensor_dict={"temperature": 1.0, "pad_token_id": pad_id},
    )
    mask = padded(masks)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(used)), last_state_token(mask)] = torch.tensor([t.score.total for t in trajectories])
    return (
        StepTensors(
            data=data,
            mask=mask,
            token_rewards=rewards,
            engine_log_probs=padded(log_probs),
            current=_current(trajectories, version, epoch, mask),
            uids=tuple(t.group_uid for t in trajectories),
            positions=tuple(place for place, _ in used),
            rows=len(rows),
            dead_groups=dead,
        ),
        dead,
    )


def last_state_token(mask: torch.Tensor) -> torch.Tensor:
    """Column of each row's last 1, (rows,); every row has one."""
    return mask.shape[1] - 1 - mask.flip(1).argmax(1)


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """(rows, longest) float32, 0 beyond a row's end."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


def like_response(values: torch.Tensor, data: TensorDict) -> torch.Tensor:
    """Padded (rows, tokens) → jagged with the lengths of `data["responses"]`."""
    lengths = data["responses"].offsets().diff().tolist()
    return torch.nested.as_nested_tensor(
        [row[:length] for row, length in zip(values, lengths, strict=True)], layout=torch.jagged
    )


def select(data: TensorDict, rows: Sequence[int]) -> TensorDict:
    """The given rows, in the given order."""
    return tu.index_select_tensor_dict(data, list(rows))


def _jagged(rows: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def _current(trajectories: Sequence[Trajectory], version: int, epoch: int, mask: torch.Tensor) -> torch.Tensor:
    current = torch.zeros_like(mask, dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        for segment in trajectory.segments:
            if segment.version == version and segment.epoch == epoch:
                current[row, segment.begin : segment.end] = True
    return current & mask.bool()
