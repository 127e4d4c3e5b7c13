"""The trajectories of a batch that take part in a step, and their tensors.

Two layouts: verl's no-padding TensorDict (jagged, for the engine), which each process builds of the rows that it
computes, and padded (rows, tokens) matrices over the response (for estimators and metrics), which rank 0 alone has.
Both hold only the rows that take part in the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from forage_proto.v1.trajectory_pb2 import Status
from forage_queue.trainer.slots import list_positions
from forage_runtime.settings import AdvantageEstimator, AlgorithmSettings, TrainerSettings
from forage_trainer.algorithms.estimators.groups import find_participants
from forage_trainer.algorithms.token_rewards import compute_token_rewards, to_structured_reward
from forage_trajectory.trajectory import AnyColumns, Group, Trajectory

LEFT_OUT = "left out of the step, "
"""What the detail of a status begins with where `leave_out_unusable` has given it."""
NO_ROW = -1
RowValues: TypeAlias = torch.Tensor | Mapping[int, torch.Tensor]
"""A value for each token of a row's response, by row: (rows, tokens), or those of some rows."""


@dataclass(frozen=True)
class Selection:
    """Rows that take part, and the groups that do not.

    trajectories: the rows; positions: of each row's group within the step (`slots.list_positions`), which does
        not depend on the groups that are missing.
    dead_groups: number of groups with too few valid rows.
    filtered: positions of groups left out because their rewards are all equal.
    """

    trajectories: tuple[Trajectory, ...]
    positions: tuple[int, ...]
    dead_groups: int
    filtered: tuple[int, ...]


SELECTED_NONE = Selection((), (), 0, ())


def select_trajectories(groups: Sequence[Group], settings: AlgorithmSettings) -> Selection:
    """Select the valid rows of groups that have enough of them for the estimator.

    With `filter_groups` also only those of groups with unequal rewards.
    """
    rows = [(number, t) for number, group in enumerate(groups) for t in group.trajectories]
    valid = torch.tensor([is_valid(t) for _, t in rows], dtype=torch.bool)
    participants = find_participants([number for number, _ in rows], valid, settings.adv_estimator.min_samples)
    # Groups without any trajectory have no rows, so they are counted here.
    dead = participants.dead_groups + sum(not group.trajectories for group in groups)
    filtered = find_equal_groups(groups, settings.adv_estimator) if settings.filter_groups else ()
    used = [row for row, use in zip(rows, participants.used.tolist(), strict=True) if use and row[0] not in filtered]
    positions = list_positions(groups)
    own = tuple(positions[number] for number, _ in used)
    return Selection(tuple(t for _, t in used), own, dead, tuple(positions[number] for number in filtered))


def leave_out_unusable(groups: Sequence[Group], settings: TrainerSettings) -> tuple[list[Group], dict[str, int]]:
    """Give a status to sound trajectories that cannot be trained on, which keeps them out of loss and baseline.

    Those are trajectories longer than a micro-batch, which verl cannot split, and those with a cut context: the engine
    sampled tokens under another context than the one that the trainer would compute their probabilities under.

    Returns:
        The groups, and how many were left out: `too_long_trajectories` and `cut_trajectories`.
    """
    counts = {"too_long_trajectories": 0, "cut_trajectories": 0}
    left = []
    for group in groups:
        reasons = [_find_unusable(trajectory, settings) for trajectory in group.trajectories]
        for which, _ in filter(None, reasons):
            counts[which] += 1
        left.append(replace(group, trajectories=tuple(map(_leave_out, group.trajectories, reasons))))
    return left, counts


def _find_unusable(trajectory: Trajectory, settings: TrainerSettings) -> tuple[str, str] | None:
    """Why a sound trajectory cannot be trained on: what it counts as, and the detail; None where it can."""
    if not is_valid(trajectory):
        return None
    limit = settings.actor.ppo_max_token_len_per_gpu
    if (tokens := trajectory.counts.tokens) > limit:
        reason = f"too long: it has {tokens} tokens, and trainer.actor.ppo_max_token_len_per_gpu is {limit}"
        return "too_long_trajectories", reason
    cut = next((turn for turn in trajectory.turns if turn.context_begin), None)
    if cut is None:
        return None
    return "cut_trajectories", f"cut context: turn {cut.index} was sampled without the first {cut.context_begin} tokens"


def _leave_out(trajectory: Trajectory, reason: tuple[str, str] | None) -> Trajectory:
    if reason is None:
        return trajectory
    return replace(trajectory, status=Status.STATUS_INVALID_INPUT, status_detail=LEFT_OUT + reason[1])


def has_equal_rewards(group: Group, estimator: AdvantageEstimator) -> bool:
    """Whether a group gives no gradient because its rewards are all equal."""
    return bool(find_equal_groups([group], estimator))


def find_equal_groups(groups: Sequence[Group], estimator: AdvantageEstimator) -> tuple[int, ...]:
    """Numbers of the groups with two or more valid rows whose rewards are all equal: they give no gradient.

    Multi-turn GRPO compares the rewards of turns too, so for it those must also be equal.
    """
    equal_groups = []
    for number, group in enumerate(groups):
        valid = [t for t in group.trajectories if is_valid(t)]
        if len(valid) < 2:
            continue
        if estimator is AdvantageEstimator.GRPO_MULTITURN:
            rewards = [to_structured_reward(t.score) for t in valid]
            turns = {value for reward in rewards for value in reward.turns.values()}
            equal = len(turns) <= 1 and len({reward.whole for reward in rewards}) == 1
        else:
            equal = len({t.score.total for t in valid}) == 1
        if equal:
            equal_groups.append(number)
    return tuple(equal_groups)


def is_valid(trajectory: Trajectory) -> bool:
    """Whether a trajectory may enter loss and baseline.

    Valid: no failure, a finite reward, at least one state token, and one value for each response token in every field.
    """
    return (
        trajectory.status == Status.STATUS_OK
        and trajectory.score.status == Status.STATUS_OK
        and math.isfinite(trajectory.score.total)
        and all(math.isfinite(part.weighted) for part in trajectory.score.components)
        and trajectory.prompt_length > 0
        and trajectory.counts.whole
        and trajectory.counts.sampled > 0
    )


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a step as every process knows them: their sizes, and where their tokens are.

    columns: of each row; loaded where a process computes with the row.
    prompts, responses: number of tokens of each row's prompt and response.
    temperatures: those that the rows were sampled at; the engine's log-probabilities are those at it.
    positions: position of each row's group within the batch.
    pad_id: token id for padding inside the engine.
    state_masking: False trains on every token of a response.
    untrained: rows that are in no loss.
    """

    columns: Sequence[AnyColumns]
    prompts: Sequence[int]
    responses: Sequence[int]
    temperatures: Sequence[float]
    positions: Sequence[int]
    pad_id: int
    state_masking: bool
    untrained: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens of the longest response): that of padded matrices."""
        return len(self), max(self.responses)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]

    def is_trained(self, row: int) -> bool:
        """Whether a row is in the losses."""
        return row not in self.untrained

    def build(self, rows: Sequence[int], values: Mapping[str, RowValues] | None = None, filler: int = 0) -> TensorDict:
        """Build the engine's input of some rows, in the given order.

        It has jagged `input_ids`, `position_ids`, `prompts`, `responses`, `response_mask`, `loss_mask`, `state_mask`,
        `rollout_log_probs`, and `row` (rows,), the row's number. `response_mask` and `loss_mask` hold the same: 1 on
        tokens that are trained on.

        Args:
            values: more fields over the response, by name.
            filler: so many rows at the end fill gaps: they get the number -1, and masks of 0.
        """
        from verl.utils import tensordict_utils as tu  # imports Ray, whose environment must be set before

        columns = [self.columns[row].load() for row in rows]
        prompts, responses = ([sizes[row] for row in rows] for sizes in (self.prompts, self.responses))
        lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        numbers = [*rows[: len(rows) - filler], *[NO_ROW] * filler]
        # Masks and log-probabilities of other tokens than the policy's are made here: no file holds them.
        state = np.concatenate([one.sampled for one in columns], dtype=np.float32)
        weights = np.array([row != NO_ROW and self.is_trained(row) for row in numbers], np.float32)
        mask: npt.NDArray[np.float32] = np.repeat(weights, responses)
        if self.state_masking:
            mask *= state
        tokens = [one.token_ids for one in columns]
        begins = np.cumsum(lengths) - lengths
        flat = {
            "input_ids": (np.concatenate(tokens, dtype=np.int64), lengths),
            "position_ids": (np.arange(sum(lengths)) - np.repeat(begins, lengths), lengths),
            "prompts": (_join([row[:size] for row, size in zip(tokens, prompts, strict=True)]), prompts),
            "responses": (_join([row[size:] for row, size in zip(tokens, prompts, strict=True)]), responses),
            "response_mask": (mask, responses),
            "loss_mask": (mask, responses),
            "state_mask": (state, responses),
            "rollout_log_probs": (np.concatenate([one.spread_log_probs() for one in columns]), responses),
        }
        jagged = {name: _to_jagged(torch.from_numpy(content), sizes) for name, (content, sizes) in flat.items()}
        data = tu.get_tensordict(jagged | {"row": torch.tensor(numbers)}, non_tensor_dict={"pad_token_id": self.pad_id})
        # One number where it is the same for all: verl then leaves out the division by 1.
        if len(set(self.temperatures)) == 1:
            tu.assign_non_tensor(data, temperature=self.temperatures[0])
        else:
            data["temperature"] = torch.tensor([self.temperatures[row] for row in rows])
        for name, value in (values or {}).items():
            data[name] = make_jagged([value[row][:size] for row, size in zip(rows, responses, strict=True)])
        return data

    @property
    def data(self) -> TensorDict:
        """The engine's input of all rows."""
        return self.build(range(len(self)))


@dataclass(frozen=True, kw_only=True)
class StepTensors(Rows):
    """The tensors of one optimizer step.

    state: (rows, tokens) float32, 1 on state tokens: those that the policy sampled, not the environment's.
    token_rewards: (rows, tokens) float64, 0 outside the state tokens: their sums are compared within a group.
    engine_log_probs: (rows, tokens) float32, 0 outside the state tokens.
    turn_ids: (rows, tokens) int32, from 1 on state tokens, -1 elsewhere.
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

    @cached_property
    def mask(self) -> torch.Tensor:
        """(rows, tokens) float32, 1 on tokens that are trained on: state tokens, or all where state masking is off."""
        if self.state_masking and not self.untrained:
            return self.state
        mask = self.state.clone()
        for row, length in enumerate(self.responses):
            if row in self.untrained:
                mask[row] = 0
            elif not self.state_masking:
                mask[row, :length] = 1
        return mask


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
    counts = [t.counts for t in trajectories]
    shape = len(counts), max(one.response for one in counts)
    state, log_probs = torch.zeros(shape), torch.zeros(shape)
    token_rewards = torch.zeros(shape, dtype=torch.double)
    turn_ids, current = torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape, dtype=torch.bool)
    columns = [t.columns for t in trajectories]
    for row, (trajectory, one) in enumerate(zip(trajectories, columns, strict=True)):
        length, (mask, turns) = counts[row].response, trajectory.read_mask()
        state[row, :length] = torch.from_numpy(mask)
        # The engine has no log-probability of tokens that it did not sample.
        log_probs[row, :length] = torch.from_numpy(one.load().spread_log_probs())
        turn_ids[row, :length] = torch.from_numpy(turns)
        rewards = compute_token_rewards(trajectory, settings.placement).rewards
        token_rewards[row, :length] = torch.from_numpy(rewards)
        for segment in trajectory.segments:
            if segment.version == version and segment.epoch == epoch:
                current[row, segment.begin : segment.end] = True
    structured = [to_structured_reward(t.score) for t in trajectories]
    return StepTensors(
        columns=columns,
        prompts=[t.prompt_length for t in trajectories],
        responses=[one.response for one in counts],
        # A greedy token's log-probability is that at temperature 1.
        temperatures=[t.sampling.temperature or 1.0 for t in trajectories],
        positions=selected.positions,
        pad_id=pad_id,
        state_masking=settings.state_masking,
        state=state,
        token_rewards=token_rewards,
        engine_log_probs=log_probs,
        turn_ids=turn_ids,
        turn_rewards=tuple(reward.turns for reward in structured),
        whole_rewards=torch.tensor([reward.whole for reward in structured], dtype=torch.double),
        current=current & state.bool(),
        uids=tuple(t.group_uid for t in trajectories),
    )


def make_jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a jagged tensor of the rows; `torch.nested.as_nested_tensor` does the same in three times the time."""
    return _to_jagged(torch.cat(list(rows)), [len(row) for row in rows])


def split_rows(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a jagged tensor into views of its rows; faster than `unbind`."""
    rows: Sequence[torch.Tensor] = values.values().split(values.offsets().diff().tolist())
    return rows


def pad_jagged(values: torch.Tensor) -> torch.Tensor:
    """Pad a jagged tensor to (rows, longest), 0 after a row's end; return any other tensor as it is."""
    return torch.nested.to_padded_tensor(values, padding=0.0) if values.is_nested else values


def _to_jagged(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    offsets = torch.tensor([0, *lengths], device=values.device).cumsum(0)
    # Without the bounds of the lengths PyTorch would pad it to the sum of all lengths.
    bounds = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
    return torch.nested.nested_tensor_from_jagged(values, offsets, **bounds)


def _join(rows: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int64]:
    return np.concatenate(rows, dtype=np.int64)
