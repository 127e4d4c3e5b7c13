"""Whole trajectories in a Parquet file: columns for people and queries, and the message itself: nothing is lost.

The column `trajectory` holds `forage.v1.Trajectory`, serialised; the columns for people are made from it and never read
back. A writer may add columns of its own, which are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf.message import DecodeError

from forage_common.errors import DataError
from forage_common.files import durable
from forage_common.v1.trajectory_pb2 import ActionKind, Role, Status, Trajectory

VERSION = "1"
_VERSION_KEY = b"forage.trajectories"
_END_OF_TURN_KEY = b"forage.end_of_turn"
_BATCH = 256
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("run_id", pa.string()),
        ("group_uid", pa.string()),
        ("sample", pa.uint32()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("answer", pa.string()),
        ("targets", pa.list_(pa.string())),
        ("status", pa.string()),
        ("reward", pa.string()),
        ("score", pa.float64()),
        ("components", pa.list_(pa.struct([("name", pa.string()), ("raw", pa.float64()), ("weighted", pa.float64())]))),
        ("turns", pa.uint32()),
        ("searches", pa.uint32()),
        ("finished", pa.bool_()),
        ("truncated", pa.bool_()),
        ("policy_version", pa.uint64()),
        ("trajectory", pa.binary()),
    ]
)


@dataclass(frozen=True)
class FileHeader:
    """What a file says of itself.

    Attributes:
        rows: trajectories.
        end_of_turn: text with which the policy's tokenizer ends a turn; rewards strip it.
    """

    rows: int
    end_of_turn: str


class TrajectoryWriter:
    """Writes a file that appears, whole, when the writer is closed; what is in it already can be kept.

    Attributes:
        statuses: how many rows of each there are by now.

    Example:
        with TrajectoryWriter(Path("out.parquet"), "<|im_end|>") as writer:
            writer.write(trajectory)
    """

    def __init__(
        self, file: Path, end_of_turn: str, keep: bool = False, more: Sequence[tuple[str, pa.DataType]] = ()
    ) -> None:
        """Open the file aside.

        Args:
            keep: begin with the rows that the file holds, where it exists; else it is replaced. Not with `more`.
            more: columns beside those that follow from a trajectory.

        Raises:
            DataError: the file to keep is none of these, or its folder cannot be written to.
        """
        self._file = file
        self._aside = file.with_name(f"{durable.PARTIAL_PREFIX}{file.name}")
        self._rows: list[dict[str, Any]] = []
        self.statuses: Counter[str] = Counter()
        self._schema = pa.schema([*_SCHEMA, *more])
        metadata = {_VERSION_KEY: VERSION.encode(), _END_OF_TURN_KEY: end_of_turn.encode()}
        kept = read_trajectories(file) if keep and file.exists() else iter(())
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._aside, self._schema.with_metadata(metadata), compression="zstd")
        except OSError as error:
            raise DataError(f"{file} cannot be written ({error.strerror or error}): choose another place") from None
        try:
            for trajectory in kept:
                self.write(trajectory)
        except BaseException:
            self._writer.close()
            self._aside.unlink(missing_ok=True)
            raise

    def write(self, trajectory: Trajectory, more: Mapping[str, Any] | None = None) -> None:
        """Add one row, with the values of further columns; those that are not given are null."""
        row = _row(trajectory) | dict(more or {})
        self._rows.append(row)
        self.statuses[row["status"]] += 1
        if len(self._rows) >= _BATCH:
            self._flush()

    def close(self) -> None:
        """Bring the file to its place."""
        self._flush()
        self._writer.close()
        durable.sync(self._aside)
        self._aside.replace(self._file)
        durable.sync(self._file.parent)

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, also where the work was interrupted: what was done stays."""
        self.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
            self._rows.clear()


def read_header(file: Path) -> FileHeader:
    """What the file says of itself.

    Raises:
        DataError: it is missing, no Parquet, or not of this form and version.
    """
    with _open(file) as parquet:
        metadata = parquet.schema_arrow.metadata
        return FileHeader(parquet.metadata.num_rows, metadata.get(_END_OF_TURN_KEY, b"").decode())


def read_ids(file: Path) -> set[str]:
    """Ids of the trajectories in the file; of a file that does not exist, none.

    Raises:
        DataError: it exists and is not of this form and version.
    """
    if not file.exists():
        return set()
    with _open(file) as parquet:
        return set(parquet.read(columns=["id"])["id"].to_pylist())


def read_trajectories(file: Path) -> Iterator[Trajectory]:
    """Every trajectory, in the order of the file, a batch of rows in memory at a time.

    Raises:
        DataError: it is missing, no Parquet, not of this form and version, or damaged; names the row.
    """
    for trajectory, _ in read_with_columns(file, ()):
        yield trajectory


def read_with_columns(file: Path, columns: Sequence[str]) -> Iterator[tuple[Trajectory, dict[str, Any]]]:
    """Every trajectory with its values of the columns that its writer has added.

    Raises:
        DataError: as `read`, or it lacks one of the columns.
    """
    with _open(file) as parquet:
        missing = [name for name in columns if name not in parquet.schema_arrow.names]
        if missing:
            raise DataError(f"{file} has no column '{missing[0]}': it holds trajectories, but not those of a step")
        number = 0
        try:
            for batch in parquet.iter_batches(_BATCH, columns=["trajectory", *columns]):
                for row in batch.to_pylist():
                    number += 1
                    yield Trajectory.FromString(row.pop("trajectory")), row
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} is damaged after row {number} ({_words(error)}): write it again") from None
        except (DecodeError, TypeError) as error:
            raise DataError(f"{file} row {number} holds no trajectory ({_words(error)}): write it again") from None


def _open(file: Path) -> pq.ParquetFile:
    remedy = "give a file of 'forage rollout sample' or of a run"
    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet ({_words(error)}): {remedy}") from None
    found = (parquet.schema_arrow.metadata or {}).get(_VERSION_KEY, b"").decode()
    if found != VERSION or "trajectory" not in parquet.schema_arrow.names:
        parquet.close()
        is_what = f"are trajectories of version {found!r}, not {VERSION!r}" if found else "are no whole trajectories"
        raise DataError(f"the rows of {file} {is_what}: {remedy}")
    return parquet


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _row(trajectory: Trajectory) -> dict[str, Any]:
    answers = [turn.content for turn in trajectory.turns if turn.action == ActionKind.ACTION_KIND_ANSWER]
    text = {True: "", False: ""}
    for span in trajectory.spans:
        text[span.role == Role.ROLE_PROMPT] += span.text
    score = trajectory.score
    return {
        "id": trajectory.id,
        "run_id": trajectory.run_id,
        "group_uid": trajectory.group_uid,
        "sample": trajectory.sample,
        "data_source": trajectory.data_source,
        "prompt": text[True],
        "response": text[False],
        "answer": answers[-1] if answers else None,
        "targets": list(trajectory.ground_truth.targets),
        "status": Status.Name(trajectory.status).removeprefix("STATUS_"),
        "reward": score.reward or None,
        "score": score.total if score.status == Status.STATUS_OK else None,
        "components": [{"name": c.name, "raw": c.raw, "weighted": c.weighted} for c in score.components],
        "turns": len(trajectory.turns),
        "searches": trajectory.valid_searches,
        "finished": trajectory.finished,
        "truncated": trajectory.truncated,
        "policy_version": max((segment.version for segment in trajectory.segments), default=None),
        "trajectory": trajectory.SerializeToString(),
    }
