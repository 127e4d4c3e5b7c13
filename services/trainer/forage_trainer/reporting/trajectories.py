"""The trajectories of every n-th step, for inspection: `<run folder>/trajectories/step-<n>.parquet`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from forage_queue.trainer.batcher import Batch
from forage_queue.trainer.slots import list_positions
from forage_records.step_file import Fate, GroupFate, StepRow, step_file_path, write_step
from forage_records.trajectory_file import explain_failure
from forage_runtime.files import durable
from forage_runtime.files.model_folder import read_end_of_turn
from forage_runtime.settings import Settings
from forage_trainer.data.tensors import LEFT_OUT, Selection, StepTensors, is_valid
from forage_trainer.data.texts import TextReader
from forage_trajectory.codec import restore_group
from forage_trajectory.trajectory import Group, Trajectory


@dataclass(frozen=True)
class StepRecord:
    """A step's values for its trajectories; tensors are (rows, tokens), or None where the settings need none.

    version: of the policy that was trained.
    tensors: their rows are `rows`; None where the step took no update.
    log_probs, entropies: the trainer's, before its first update.
    token_rewards: after the KL penalty; advantages: after the penalty for overconfidence.
    overconfidence: of each row, None for a row that was not probed; None where no row was.
    unused: why the step took no update; empty where it did.
    """

    batch: Batch
    selected: Selection
    version: int
    tensors: StepTensors | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    token_rewards: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None
    overconfidence: Sequence[float | None] | None = None
    entropies: torch.Tensor | None = None
    unused: str = ""

    @property
    def groups(self) -> list[Group]:
        """All groups of the batch."""
        return self.batch.groups

    @property
    def rows(self) -> tuple[Trajectory, ...]:
        """The trajectories that took part, in the order of the tensors' rows."""
        return () if self.tensors is None else self.selected.trajectories


class StepFiles:
    """Writes the records of every `trainer.rollout_data_freq`-th step of a run."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.run.folder
        self._every = settings.trainer.rollout_data_freq
        self._min_samples = settings.trainer.algorithm.adv_estimator.min_samples
        self._end_of_turn = read_end_of_turn(settings.model.path)
        self._texts = TextReader(settings.model.path)

    def is_kept(self, step: int) -> bool:
        """Whether this step's trajectories are kept."""
        return self._every > 0 and step % self._every == 0

    def write(self, step: int, late: Sequence[str], record: StepRecord) -> Path:
        """Write a step's file; a file of the step from before a restart is replaced.

        Args:
            late: uids of the groups that did not arrive in time, in the order of the batch's `stragglers`.

        Raises:
            DiskFullError: there is no room.
        """
        file = step_file_path(self._folder, step)
        fates = list_fates(record, self._min_samples, late)
        with durable.detect_full_disk(file):
            write_step(file, self._end_of_turn, build_rows(step, record, fates, self._texts), fates)
        return file


def list_fates(record: StepRecord, min_samples: int, late: Sequence[str] = ()) -> list[GroupFate]:
    """List what became of every group of the step's slots, by position.

    Args:
        min_samples: valid trajectories that the estimator needs of a group.
        late: see `StepFiles.write`.
    """
    fates = list(record.batch.dropped)
    for (_, position), uid in zip(record.batch.stragglers, late, strict=False):
        fates.append(GroupFate(uid, position, 0, Fate.DROPPED, "straggler: it did not arrive in time"))
    for group, position in zip(record.groups, list_positions(record.groups), strict=True):
        fate, reason = _find_fate(group, position, record, min_samples)
        fates.append(GroupFate(group.group_uid, group.position, group.attempt, fate, reason))
    return sorted(fates, key=lambda fate: (fate.position, fate.attempt))


def build_rows(step: int, record: StepRecord, fates: Sequence[GroupFate], texts: TextReader) -> Iterator[StepRow]:
    """Build the rows of all trajectories of the batch; those that took no part have no values of the step.

    Args:
        fates: of the step's groups.
        texts: puts the trajectories' texts back.
    """
    row_numbers = {trajectory.id: row for row, trajectory in enumerate(record.rows)}
    reasons = {fate.uid: f"group {fate.fate}: {fate.reason}" for fate in fates if fate.fate is not Fate.DROPPED}
    pairs = chain.from_iterable(zip(group.trajectories, restore_group(group), strict=True) for group in record.groups)
    for trajectory, message in pairs:
        texts.restore([message])
        row = row_numbers.get(trajectory.id)
        if row is None or record.tensors is None:
            reason = _explain_invalid(trajectory) or reasons[trajectory.group_uid]
            yield StepRow(message, step, record.version, trained=False, reason=reason)
            continue
        length = trajectory.counts.response
        mask = record.tensors.mask[row, :length]
        yield StepRow(
            message,
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
            entropies=_slice_row(record.entropies, row, length),
            reason=None if mask.any() else "cut off by a limit: in the baseline of its group, not in the losses",
        )


def _find_fate(group: Group, position: int, record: StepRecord, min_samples: int) -> tuple[Fate, str]:
    valid = sum(map(is_valid, group.trajectories))
    if valid < max(1, min_samples):
        failures = Counter(_explain_invalid(trajectory) for trajectory in group.trajectories)
        kinds = "; ".join(f"{count} × {reason}" for reason, count in failures.most_common() if reason)
        needs = f"{valid} of {len(group.trajectories)} trajectories are valid, {max(1, min_samples)} needed"
        return Fate.DEAD, f"{needs} ({kinds})" if kinds else needs
    if position in record.selected.filtered:
        return Fate.FILTERED, "all rewards are equal"
    if record.unused:
        return Fate.UNUSED, f"the step took no update: {record.unused}"
    return Fate.TRAINED, ""


def _explain_invalid(trajectory: Trajectory) -> str | None:
    """Explain why a trajectory may not enter loss and baseline; None where it may."""
    if trajectory.status_detail.startswith(LEFT_OUT):
        return trajectory.status_detail.removeprefix(LEFT_OUT)
    if is_valid(trajectory):
        return None
    if reason := explain_failure(trajectory.status, trajectory.status_detail, trajectory.score):
        return reason
    if not trajectory.counts.sampled:
        return "invalid: no token of the policy"
    return "invalid: a reward that is not finite, or values that are missing for some tokens"


def _slice_row(tensor: torch.Tensor | None, row: int, length: int) -> list[float] | None:
    return None if tensor is None else tensor[row, :length].float().tolist()
