"""The trajectories of every n-th step, for inspection: `<run folder>/trajectories/step-<n>.parquet`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from forage_common.files import durable
from forage_common.files.model_folder import read_end_of_turn
from forage_common.settings import Settings
from forage_common.v1.trajectory_pb2 import Trajectory, TrajectoryGroup
from forage_records.step_file import StepRow, list_saved_steps, step_file_path, write_step
from forage_trainer.data.tensors import StepTensors


@dataclass(frozen=True)
class StepRecord:
    """A step's values for its trajectories; tensors are (rows, tokens), or None where the settings need none.

    groups: all groups of the batch; rows: the trajectories that took part, in the order of the tensors' rows.
    version: of the policy that was trained.
    log_probs: the trainer's, before its first update.
    token_rewards: after the KL penalty; advantages: after the penalty for overconfidence.
    overconfidence: of each row, None for a row that was not probed; None where no row was.
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

    def is_kept(self, step: int) -> bool:
        """Whether this step's trajectories are kept."""
        return self._every > 0 and step % self._every == 0

    def write(self, step: int, record: StepRecord) -> Path:
        """Write a step's file and delete the oldest one; a file of the step from before a restart is replaced.

        Raises:
            DiskFullError: there is no room.
        """
        file = step_file_path(self._folder, step)
        with durable.detect_full_disk(file):
            write_step(file, self._end_of_turn, build_rows(step, record))
        # Files of later steps are from before a restart; this process will replace them.
        upto = [kept for kept in list_saved_steps(self._folder) if kept <= step]
        for old in upto[: -self._keep] if self._keep else ():
            step_file_path(self._folder, old).unlink()
        return file


def build_rows(step: int, record: StepRecord) -> Iterator[StepRow]:
    """Build the rows of all trajectories of the batch; those that took no part have no values of the step."""
    row_numbers = {trajectory.id: row for row, trajectory in enumerate(record.rows)}
    for trajectory in chain.from_iterable(group.trajectories for group in record.groups):
        row = row_numbers.get(trajectory.id)
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
            advantages=_slice_row(record.advantages, row, length),
            returns=_slice_row(record.returns, row, length),
            token_rewards=_slice_row(record.token_rewards, row, length),
            log_probs=_slice_row(record.log_probs, row, length),
            engine_log_probs=_slice_row(record.tensors.engine_log_probs, row, length),
            reference_log_probs=_slice_row(record.reference, row, length),
            values=_slice_row(record.values, row, length),
            overconfidence=None if record.overconfidence is None else record.overconfidence[row],
        )


def _slice_row(tensor: torch.Tensor | None, row: int, length: int) -> list[float] | None:
    return None if tensor is None else tensor[row, :length].float().tolist()
