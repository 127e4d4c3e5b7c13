"""The trajectories of one optimizer step as a file, each with the trainer's values for it.

`<run>/trajectories/step-<n>.parquet` has the columns of `trajectory_file` and those below. All lists have one value per
response token. Values that the step did not compute, and those of trajectories that were not trained on, are null.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from forage_common.v1.trajectory_pb2 import Trajectory
from forage_records.trajectory_file import TrajectoryWriter, read_with_columns

FOLDER = "trajectories"
_NAME = re.compile(r"step-(\d{6,})\.parquet")
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


def step_file_path(run: Path, step: int) -> Path:
    """The path of the file of a step."""
    return run / FOLDER / f"step-{step:06d}.parquet"


def list_saved_steps(run: Path) -> list[int]:
    """List the steps of a run that have a file."""
    names = (_NAME.fullmatch(file.name) for file in (run / FOLDER).glob("step-*.parquet"))
    return sorted(int(match[1]) for match in names if match)


def write_step(file: Path, end_of_turn: str, rows: Iterable[StepRow]) -> None:
    """Write a step's rows; the file is never partially visible."""
    with TrajectoryWriter(file, end_of_turn, extra_columns=list(_COLUMNS.items())) as writer:
        for row in rows:
            writer.write(row.trajectory, {name: getattr(row, name) for name in _COLUMNS})


def read_step(file: Path) -> Iterator[StepRow]:
    """Read every row, in the order of the file.

    Raises:
        DataError: the file is missing, damaged, or not of a step.
    """
    for trajectory, more in read_with_columns(file, list(_COLUMNS)):
        yield StepRow(trajectory, **more)
