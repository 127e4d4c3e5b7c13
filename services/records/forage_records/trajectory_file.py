"""Trajectories in a Parquet file: columns for queries, and the complete message.

The column `trajectory` holds the serialised `forage.v1.Trajectory`; the other columns are derived from it and never
read back. A writer may add extra columns, which are read back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """The metadata of a file.

    Attributes:
        rows: number of trajectories.
        end_of_turn: text with which the policy's tokenizer ends a turn; rewards strip it.
    """

    rows: int
    end_of_turn: str


class TrajectoryWriter:
    """Writes a file that appears under its name when the writer is closed; its present rows can be kept.

    Attributes:
        statuses: number of rows by status so far.

    Example:
        with TrajectoryWriter(Path("out.parquet"), "<|im_end|>") as writer:
            writer.write(trajectory)
    """

    def __init__(
        self, file: Path, end_of_turn: str, keep: bool = False, extra_columns: Sequence[tuple[str, pa.DataType]] = ()
    ) -> None:
        """Open a temporary file beside the target.

        Args:
            keep: begin with the rows of the existing file; else it is replaced. Not together with `extra_columns`.
            extra_columns: columns besides those derived from a trajectory.

        Raises:
            DataError: the file to keep is not a file of trajectories, or the folder is not writable.
        """
        self._file = file
        self._temporary = durable.name_partial(file)
        self._rows: list[dict[str, Any]] = []
        self.statuses: Counter[str] = Counter()
        self._schema = pa.schema([*_SCHEMA, *extra_columns])
        metadata = {_VERSION_KEY: VERSION.encode(), _END_OF_TURN_KEY: end_of_turn.encode()}
        kept = read_trajectories(file) if keep and file.exists() else iter(())
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._temporary, self._schema.with_metadata(metadata), compression="zstd")
        except OSError as error:
            if error.errno in durable.FULL:
                raise
            raise DataError(f"{file} cannot be written ({error.strerror or error}): choose another place") from None
        try:
            for trajectory in kept:
                self.write(trajectory)
        except BaseException:
            self._writer.close()
            self._temporary.unlink(missing_ok=True)
            raise

    def write(self, trajectory: Trajectory, extra_values: Mapping[str, Any] | None = None) -> None:
        """Add one row with values of the extra columns; missing ones are null."""
        row = _row(trajectory) | dict(extra_values or {})
        self._rows.append(row)
        self.statuses[row["status"]] += 1
        if len(self._rows) >= _BATCH:
            self._flush()

    def close(self) -> None:
        """Finish the file and move it to its name."""
        self._flush()
        self._writer.close()
        durable.sync(self._temporary)
        self._temporary.replace(self._file)
        durable.sync(self._file.parent)

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file, also after an error: the rows written so far are kept."""
        self.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
            self._rows.clear()


def read_header(file: Path) -> FileHeader:
    """Read the header of a trajectory file.

    Raises:
        DataError: the file is missing, not Parquet, or not of this format and version.
    """
    with _open(file) as parquet:
        metadata = parquet.schema_arrow.metadata
        return FileHeader(parquet.metadata.num_rows, metadata.get(_END_OF_TURN_KEY, b"").decode())


def read_ids(file: Path) -> set[str]:
    """Read the ids of the trajectories in a file; none if the file does not exist.

    Raises:
        DataError: the file is not of this format and version.
    """
    if not file.exists():
        return set()
    with _open(file) as parquet:
        return set(parquet.read(columns=["id"])["id"].to_pylist())


def read_trajectories(file: Path) -> Iterator[Trajectory]:
    """Read every trajectory, in the order of the file, with one batch of rows in memory at a time.

    Raises:
        DataError: the file is missing, not Parquet, not of this format and version, or damaged; names the row.
    """
    for trajectory, _ in read_with_columns(file, ()):
        yield trajectory


def read_with_columns(file: Path, columns: Sequence[str]) -> Iterator[tuple[Trajectory, dict[str, Any]]]:
    """Read every trajectory with the values of extra columns.

    Raises:
        DataError: as `read_trajectories`, or the file lacks one of the columns.
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
            raise DataError(f"{file} is damaged after row {number} ({_describe(error)}): write it again") from None
        except (DecodeError, TypeError) as error:
            raise DataError(f"{file} row {number} holds no trajectory ({_describe(error)}): write it again") from None


def _open(file: Path) -> pq.ParquetFile:
    remedy = "give a file of 'forage rollout sample' or of a run"
    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet ({_describe(error)}): {remedy}") from None
    version = (parquet.schema_arrow.metadata or {}).get(_VERSION_KEY, b"").decode()
    if version != VERSION or "trajectory" not in parquet.schema_arrow.names:
        parquet.close()
        problem = (
            f"are trajectories of version {version!r}, not {VERSION!r}" if version else "are not complete trajectories"
        )
        raise DataError(f"the rows of {file} {problem}: {remedy}")
    return parquet


def _describe(error: Exception) -> str:
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
