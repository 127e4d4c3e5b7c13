"""Trajectories → the tensors of one optimizer step.

Two layouts: verl's no-padding TensorDict (jagged, for the engine), and padded (rows, tokens) matrices over the response
(for estimators and metrics). Both hold only the rows that take part in the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from forage_common.settings import AlgorithmSettings
from forage_common.v1.trajectory_pb2 import Trajectory
from forage_trainer.algorithms.token_rewards import compute_token_rewards, to_structured_reward
from forage_trainer.data.selection import Selection


@dataclass(frozen=True)
class Rows:
    """The part of a step's tensors that workers need, on every process.

    data: jagged `input_ids`, `position_ids`, `prompts`, `responses`, `response_mask`, `loss_mask`, `state_mask`,
        `rollout_log_probs`, and `row` (rows,), the row's number.
    mask: (rows, tokens) float32 over the response, 1 on tokens that are trained on: state tokens, or all of them
        where state masking is off. `response_mask` and `loss_mask` hold the same values.
    positions: position of each row's group within the batch.
    """

    data: TensorDict
    mask: torch.Tensor
    positions: Sequence[int]


@dataclass(frozen=True)
class StepTensors(Rows):
    """The tensors of one optimizer step.

    state: (rows, tokens) float32, 1 on state tokens: those that the policy sampled, not the environment's.
    token_rewards: (rows, tokens) float64, 0 outside the state tokens: their sums are compared within a group.
    engine_log_probs: (rows, tokens) float32, 0 outside the state tokens.
    turn_ids: (rows, tokens) long, from 1 on state tokens, -1 elsewhere.
    turn_rewards, whole_rewards: for each row, the rewards of its turns by turn id, and (rows,) the rest of its score.
    current: (rows, tokens) bool, state tokens sampled under exactly the policy that is being trained. On these alone
        a difference of log-probabilities is an error of the engines; on others it is staleness too.
    uids: group of each row.
    """

    state: torch.Tensor
    token_rewards: torch.Tensor
    engine_log_probs: torch.Tensor
    turn_ids: torch.Tensor
    turn_rewards: tuple[Mapping[int, float], ...]
    whole_rewards: torch.Tensor
    current: torch.Tensor
    uids: tuple[str, ...]


def build_step_tensors(
    selected: Selection, version: int, epoch: int, pad_id: int, settings: AlgorithmSettings
) -> StepTensors | None:
    """Build the tensors of the selected rows; None if no row takes part.

    Args:
        version, epoch: of the policy that is being trained.
        pad_id: token id for padding inside the engine.
    """
    trajectories = selected.trajectories
    if not trajectories:
        return None
    # Protobuf converts a repeated field to NumPy as a whole, some 25 times as fast as value by value.
    tokens = [np.asarray(t.token_ids, dtype=np.int64) for t in trajectories]
    states = [np.asarray(t.loss_mask, dtype=np.float32) for t in trajectories]
    masks = states if settings.state_masking else [np.ones_like(state) for state in states]
    # The engine has no log-probability of tokens that it did not sample, whatever the message holds there.
    log_probs = [
        np.where(own > 0, np.asarray(t.logprobs, dtype=np.float32), np.float32(0))
        for t, own in zip(trajectories, states, strict=True)
    ]
    data = tu.get_tensordict(
        {
            "input_ids": _make_jagged(tokens),
            "position_ids": _make_jagged([np.arange(len(row)) for row in tokens]),
            "prompts": _make_jagged([row[: t.prompt_length] for row, t in zip(tokens, trajectories, strict=True)]),
            "responses": _make_jagged([row[t.prompt_length :] for row, t in zip(tokens, trajectories, strict=True)]),
            "response_mask": _make_jagged(masks),
            "loss_mask": _make_jagged(masks),
            "state_mask": _make_jagged(states),
            "rollout_log_probs": _make_jagged(log_probs),
            "row": torch.arange(len(trajectories)),
        },
        non_tensor_dict={"pad_token_id": pad_id},
    )
    _add_temperature(data, trajectories)
    state = _padded(states)
    rewards = [to_structured_reward(t.score) for t in trajectories]
    return StepTensors(
        data=data,
        mask=_padded(masks),
        state=state,
        token_rewards=_padded(
            [np.asarray(compute_token_rewards(t, settings.placement).rewards, dtype=np.float64) for t in trajectories]
        ),
        engine_log_probs=_padded(log_probs),
        turn_ids=_padded([np.asarray(t.turn_ids, dtype=np.int64) for t in trajectories], beyond=-1),
        turn_rewards=tuple(reward.turns for reward in rewards),
        whole_rewards=torch.tensor([reward.whole for reward in rewards], dtype=torch.double),
        current=_mask_current(trajectories, version, epoch, state),
        uids=tuple(t.group_uid for t in trajectories),
        positions=selected.positions,
    )


def unpad_response(values: torch.Tensor, data: TensorDict) -> torch.Tensor:
    """Make padded (rows, tokens) jagged, with the lengths of `data["responses"]`."""
    lengths = data["responses"].offsets().diff().tolist()
    return make_jagged([row[:length] for row, length in zip(values, lengths, strict=True)])


def select_rows(data: TensorDict, rows: Sequence[int]) -> TensorDict:
    """Select the given rows, in the given order."""
    nested = {name: value for name, value in data.items() if isinstance(value, torch.Tensor) and value.is_nested}
    selected = tu.index_select_tensor_dict(data.exclude(*nested), list(rows))
    for name, value in nested.items():
        every = split_rows(value)
        selected[name] = make_jagged([every[row] for row in rows])
    return selected


def make_jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a jagged tensor of the rows; `torch.nested.as_nested_tensor` does the same in three times the time."""
    lengths = [len(row) for row in rows]
    offsets = torch.tensor([0, *lengths], device=rows[0].device).cumsum(0)
    # Without the bounds of the lengths PyTorch would pad it to the sum of all lengths.
    bounds = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(rows)), offsets, **bounds)


def split_rows(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a jagged tensor into views of its rows; faster than `unbind`."""
    rows: Sequence[torch.Tensor] = values.values().split(values.offsets().diff().tolist())
    return rows


def pad_jagged(values: torch.Tensor) -> torch.Tensor:
    """Pad a jagged tensor to (rows, longest), 0 after a row's end; return any other tensor as it is."""
    return torch.nested.to_padded_tensor(values, padding=0.0) if values.is_nested else values


def _make_jagged(rows: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    return make_jagged([torch.from_numpy(row) for row in rows])


def _padded(rows: Sequence[npt.NDArray[Any]], beyond: float = 0.0) -> torch.Tensor:
    """Pad to (rows, longest) of the rows' dtype, with `beyond` after a row's end."""
    tensors = [torch.from_numpy(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=beyond)


def _add_temperature(data: TensorDict, trajectories: Sequence[Trajectory]) -> None:
    """Add the temperature that each row was sampled at: the engine's log-probabilities are those at it.

    One number where it is the same for all: verl then leaves out the division by 1. A greedy token's log-probability is
    that at temperature 1.
    """
    temperatures = [t.sampling.temperature or 1.0 for t in trajectories]
    if len(set(temperatures)) == 1:
        tu.assign_non_tensor(data, temperature=temperatures[0])
    else:
        data["temperature"] = torch.tensor(temperatures)


def _mask_current(trajectories: Sequence[Trajectory], version: int, epoch: int, state: torch.Tensor) -> torch.Tensor:
    current = torch.zeros_like(state, dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        for segment in trajectory.segments:
            if segment.version == version and segment.epoch == epoch:
                current[row, segment.begin : segment.end] = True
    return current & state.bool()
