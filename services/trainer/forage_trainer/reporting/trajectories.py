"""The trajectories of every n-th step, kept for people: `<run folder>/trajectories/step-<n>.parquet`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from forage_common.files.model_folder import read_end_of_turn
from forage_common.files.step_file import StepRow, list_saved_steps, step_file_path, write_step
from forage_common.settings import Settings
from forage_common.v1.trajectory_pb2 import Trajectory, TrajectoryGroup
from forage_trainer.data.tensors import StepTensors


@dataclass(frozen=True)
class StepRecord:
    """What a step knew of its trajectories; tensors are (rows, tokens), or None where nothing asked for them.

    groups: all of the batch; rows: the trajectories that took part, in the order of the tensors' rows.
    version: of the policy that was trained.
    log_probs: the trainer's, before its first update.
    token_rewards: less the KL, where that is in the reward; advantages: less the penalty for overconfidence.
    overconfidence: of each row, None where it was not probed; None where nothing was.
    """

    groups: Sequence[TrajectoryGroup]
    rows: Sequence[Trajectory]
    version: int
    tensors: StepTensors | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    token_rewards: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None
    overconfidence: Sequence[float | None] | None = None


class StepFiles:
    """Writes the records of every `trainer.rollout_data_freq`-th step of a run."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.run.folder
        self._every = settings.trainer.rollout_data_freq
        self._keep = settings.trainer.rollout_data_to_keep
        self._end_of_turn = read_end_of_turn(settings.model.path)

    def keeps(self, step: int) -> bool:
        """Whether this step's trajectories are kept."""
        return self._every > 0 and step % self._every == 0

    def write(self, step: int, record: StepRecord) -> Path:
        """Write a step's file, and delete the oldest; one that is there from an earlier life of the run is replaced."""
        file = step_file_path(self._folder, step)
        write_step(file, self._end_of_turn, rows(step, record))
        # Files of later steps are those of an earlier life, which this one is going to replace.
        upto = [kept for kept in list_saved_steps(self._folder) if kept <= step]
        for old in upto[: -self._keep] if self._keep else ():
            step_file_path(self._folder, old).unlink()
        return file


def rows(step: int, record: StepRecord) -> Iterator[StepRow]:
    """All trajectories of the batch, those that took no part without values of the step."""
    places = {trajectory.id: row for row, trajectory in enumerate(record.rows)}
    for trajectory in chain.from_iterable(group.trajectories for group in record.groups):
        row = places.get(trajectory.id)
        if row is None or record.tensors is None:
            yield StepRow(trajectory, step, record.version, trained=False)
            continue
        length = len(trajectory.loss_mask)
        mask = record.tensors.mask[row, :length]
        yield StepRow(
            trajectory,
            step,
            record.version,
            trained=True,
            loss_mask=mask.int().tolist(),
            returns_sum=None if record.returns is None else float(record.returns[row, :length][mask.bool()].sum()),
            advantages=_values(record.advantages, row, length),
            returns=_values(record.returns, row, length),
            token_rewards=_values(record.token_rewards, row, length),
            log_probs=_values(record.log_probs, row, length),
            engine_log_probs=_values(record.tensors.engine_log_probs, row, length),
            reference_log_probs=_values(record.reference, row, length),
            values=_values(record.values, row, length),
            overconfidence=None if record.overconfidence is None else record.overconfidence[row],
        )


def _values(tensor: torch.Tensor | None, row: int, length: int) -> list[float] | None:
    return None if tensor is None else tensor[row, :length].float().tolist()
