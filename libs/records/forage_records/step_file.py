"""The trajectories of one optimizer step as a file, each with the trainer's values for it.

`<run>/trajectories/step-<n>.parquet` has the columns of `trajectory_file` and those below. All lists have one value per
response token. Values that the step did not compute, and those of trajectories that were not trained on, are null. The
file's metadata says what became of every group that was issued for the step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa

from forage_proto.v1.trajectory_pb2 import ActionKind, Trajectory
from forage_records.json_text import parse_json
from forage_records.statistics import mean_known
from forage_records.trajectory_file import TrajectoryWriter, read_metadata, read_with_columns
from forage_runtime.errors import DataError

FOLDER = "trajectories"
_NAME = re.compile(r"step-(\d{6,})\.parquet")
_GROUPS_KEY = b"forage.groups"
_FLOATS = pa.list_(pa.float32())
_COLUMNS = {
    "step": pa.uint64(),
    "version": pa.uint64(),
    "trained": pa.bool_(),
    "loss_mask": pa.list_(pa.uint8()),
    "returns_sum": pa.float64(),
    "advantages": _FLOATS,
    "returns": _FLOATS,
    "token_rewards": _FLOATS,
    "log_probs": _FLOATS,
    "engine_log_probs": _FLOATS,
    "reference_log_probs": _FLOATS,
    "values": _FLOATS,
    "overconfidence": pa.float64(),
}
_NEWER = {"entropies": _FLOATS, "reason": pa.string()}
"""Columns that files of before do not have; `reason` replaces that of `trajectory_file`."""
_DERIVED = {"advantage_mean": pa.float64(), "search_advantage": pa.float64(), "mismatch_max": pa.float64()}
"""Columns for queries, derived from the others and never read back."""


class Fate(StrEnum):
    """What became of a group of a step.

    TRAINED: trained on. DEAD: too few valid trajectories. FILTERED: all rewards are equal. UNUSED: the step took no
    update. DROPPED: it did not come in time, or another group came in its place.
    """

    TRAINED = "trained"
    DEAD = "dead"
    FILTERED = "filtered"
    UNUSED = "unused"
    DROPPED = "dropped"


@dataclass(frozen=True)
class GroupFate:
    """A group that was issued for a step.

    Attributes:
        uid: empty for one of which only the position is known.
        attempt: how often its position had been issued before.
        reason: a clause; empty where it was trained on.
    """

    uid: str
    position: int
    attempt: int
    fate: Fate
    reason: str = ""


@dataclass(frozen=True)
class StepRow:
    """One trajectory of a step.

    Attributes:
        version: version of the policy that the step trained.
        trained: whether the trajectory is part of baseline and loss.
        loss_mask: 1 on tokens that were trained on.
        returns_sum: sum of the returns over these tokens.
        token_rewards: input of the estimator; after subtraction of the KL if it is in the reward.
        log_probs: by the trainer before its first update; engine_log_probs: by the engine that sampled.
        reference_log_probs: by the reference policy; values: by the critic.
        overconfidence: result of a probe, whose penalty is in the advantages.
        entropies: of the trainer's distributions, before its first update.
        reason: why the trajectory was not trained on; None where it was.
    """

    trajectory: Trajectory
    step: int
    version: int
    trained: bool
    loss_mask: list[int] | None = None
    returns_sum: float | None = None
    advantages: list[float] | None = None
    returns: list[float] | None = None
    token_rewards: list[float] | None = None
    log_probs: list[float] | None = None
    engine_log_probs: list[float] | None = None
    reference_log_probs: list[float] | None = None
    values: list[float] | None = None
    overconfidence: float | None = None
    entropies: list[float] | None = None
    reason: str | None = None

    @property
    def advantage_mean(self) -> float | None:
        """Mean advantage of the tokens trained on; None without any."""
        return self._mean_advantage(None)

    @property
    def search_advantage(self) -> float | None:
        """Mean advantage of the tokens trained on in turns that search; None without any."""
        turns = self.trajectory.turns
        return self._mean_advantage({turn.index for turn in turns if turn.action == ActionKind.ACTION_KIND_SEARCH})

    @property
    def mismatch_max(self) -> float | None:
        """Highest difference of the trainer's and the engine's log-probabilities of the policy's tokens."""
        if self.log_probs is None or self.engine_log_probs is None:
            return None
        both = zip(self.trajectory.loss_mask, self.log_probs, self.engine_log_probs, strict=True)
        return max((abs(ours - theirs) for own, ours, theirs in both if own), default=None)

    def _mean_advantage(self, turns: set[int] | None) -> float | None:
        if self.advantages is None or self.loss_mask is None:
            return None
        tokens = zip(self.advantages, self.loss_mask, self.trajectory.turn_ids, strict=True)
        return mean_known(value for value, one, turn in tokens if one and (turns is None or turn in turns))


def step_file_path(run: Path, step: int) -> Path:
    """The path of the file of a step."""
    return run / FOLDER / f"step-{step:06d}.parquet"


def list_saved_steps(run: Path) -> list[int]:
    """List the steps of a run that have a file."""
    names = (_NAME.fullmatch(file.name) for file in (run / FOLDER).glob("step-*.parquet"))
    return sorted(int(match[1]) for match in names if match)


def write_step(file: Path, end_of_turn: str, rows: Iterable[StepRow], groups: Sequence[GroupFate] = ()) -> None:
    """Write a step's rows; the file is never partially visible.

    Args:
        groups: every group that was issued for the step.
    """
    columns = _COLUMNS | _NEWER | _DERIVED
    extra = [(name, kind) for name, kind in columns.items() if name != "reason"]
    metadata = {_GROUPS_KEY: json.dumps([asdict(group) for group in groups]).encode()}
    with TrajectoryWriter(file, end_of_turn, extra_columns=extra, extra_metadata=metadata) as writer:
        for row in rows:
            writer.write(row.trajectory, {name: getattr(row, name) for name in columns})


def read_step(file: Path) -> Iterator[StepRow]:
    """Read every row, in the order of the file.

    Raises:
        DataError: the file is missing, damaged, or not of a step.
    """
    for trajectory, more in read_with_columns(file, list(_COLUMNS), list(_NEWER)):
        yield _make_row(file, trajectory, more)


def read_step_row(file: Path, number: int) -> StepRow:
    """Read one row by its number, from 0, without most others.

    Raises:
        DataError: as `read_step`, or there is no such row.
    """
    (row,) = read_step_rows(file, [number])
    return row


def read_step_rows(file: Path, numbers: Collection[int]) -> Iterator[StepRow]:
    """Read the rows with these numbers, from 0, in the order of the file, without most others.

    Raises:
        DataError: as `read_step`, or there is no such row.
    """
    for trajectory, more in read_with_columns(file, list(_COLUMNS), list(_NEWER), only=numbers):
        yield _make_row(file, trajectory, more)


def _make_row(file: Path, trajectory: Trajectory, more: dict[str, Any]) -> StepRow:
    tokens = len(trajectory.turn_ids)
    for name, value in more.items():
        if isinstance(value, list) and len(value) != tokens:
            raise DataError(
                f"{file} is damaged: a trajectory has {len(value)} of {name} and {tokens} tokens: restore the file"
            )
    return StepRow(trajectory, **more)


def read_group_fates(file: Path) -> list[GroupFate] | None:
    """Read what became of the step's groups, by position; None in a file of before.

    Raises:
        DataError: the file is missing, damaged, or not of trajectories.
    """
    content = read_metadata(file, _GROUPS_KEY)
    if content is None:
        return None
    names = {field.name for field in fields(GroupFate)}
    try:
        rows = [{name: row[name] for name in row.keys() & names} for row in parse_json(content)]
        return [GroupFate(**row | {"fate": Fate(row["fate"])}) for row in rows]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise DataError(f"{file} does not say what became of its groups ({error!r}): write it again") from None
