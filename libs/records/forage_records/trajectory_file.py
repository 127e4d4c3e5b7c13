"""Trajectories in a Parquet file: columns for queries, and the complete message.

The column `trajectory` holds the serialised `forage.v1.Trajectory`; the other columns are derived from it and never
read back. A writer may add extra columns, which are read back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf.message import DecodeError

from forage_proto.v1.trajectory_pb2 import ActionKind, Role, Score, Status, Trajectory, Turn
from forage_runtime.errors import DataError
from forage_runtime.files import durable
from forage_runtime.files.parquet_rows import END_OF_TURN, TRAJECTORIES
from forage_runtime.text.enums import name_value

VERSION = "1"
_ROWS = 256
_BYTES = 8_000_000
"""A group of rows ends after so many rows, or so many bytes in memory: a reader of one row reads a group of them."""
_NUMBER_BYTES = 4
_HEADER = re.compile(r"\s*(?:<[^<>\n]+>\s*)*user\s*(?:<[^<>\n]+>\s*)*\n")
"""What a chat template puts before the text of a user's message."""
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("run_id", pa.string()),
        ("group_uid", pa.string()),
        ("sample", pa.uint32()),
        ("data_source", pa.string()),
        ("question", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("answer", pa.string()),
        ("targets", pa.list_(pa.string())),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("reward", pa.string()),
        ("score", pa.float64()),
        ("em", pa.float64()),
        ("components", pa.list_(pa.struct([("name", pa.string()), ("raw", pa.float64()), ("weighted", pa.float64())]))),
        ("turns", pa.uint32()),
        ("searches", pa.uint32()),
        ("finished", pa.bool_()),
        ("truncated", pa.bool_()),
        ("response_tokens", pa.uint32()),
        ("policy_version", pa.uint64()),
        ("policy_version_min", pa.uint64()),
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
        self,
        file: Path,
        end_of_turn: str,
        keep: bool = False,
        extra_columns: Sequence[tuple[str, pa.DataType]] = (),
        extra_metadata: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:
        """Open a temporary file beside the target.

        Args:
            keep: begin with the rows of the existing file; else it is replaced. Not together with `extra_columns`.
            extra_columns: columns besides those derived from a trajectory.
            extra_metadata: of the file.

        Raises:
            DataError: the file to keep is not a file of trajectories, or the folder is not writable.
        """
        self._file = file
        self._temporary = durable.name_partial(file)
        self._end_of_turn = end_of_turn
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0
        self.statuses: Counter[str] = Counter()
        self._schema = pa.schema([*_SCHEMA, *extra_columns])
        metadata = {TRAJECTORIES: VERSION.encode(), END_OF_TURN: end_of_turn.encode(), **extra_metadata}
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
        """Add one row with values of the extra columns, or other values of derived ones; missing ones are null."""
        row = _row(trajectory, self._end_of_turn) | dict(extra_values or {})
        self._rows.append(row)
        self._bytes += sum(map(_measure, row.values()))
        self.statuses[row["status"]] += 1
        if len(self._rows) >= _ROWS or self._bytes >= _BYTES:
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
            self._bytes = 0


def read_header(file: Path) -> FileHeader:
    """Read the header of a trajectory file.

    Raises:
        DataError: the file is missing, not Parquet, or not of this format and version.
    """
    with _open(file) as parquet:
        metadata = parquet.schema_arrow.metadata
        return FileHeader(parquet.metadata.num_rows, metadata.get(END_OF_TURN, b"").decode(errors="replace"))


def read_ids(file: Path) -> set[str]:
    """Read the ids of the trajectories in a file; none if the file does not exist.

    Raises:
        DataError: the file is not of this format and version.
    """
    if not file.exists():
        return set()
    with _open(file) as parquet:
        try:
            return set(parquet.read(columns=["id"])["id"].to_pylist())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{file} is damaged ({_describe(error)}): write it again") from None


def read_trajectories(file: Path) -> Iterator[Trajectory]:
    """Read every trajectory, in the order of the file, with one batch of rows in memory at a time.

    Raises:
        DataError: the file is missing, not Parquet, not of this format and version, or damaged; names the row.
    """
    for trajectory, _ in read_with_columns(file, ()):
        yield trajectory


def read_with_columns(
    file: Path, columns: Sequence[str], newer: Sequence[str] = (), only: Collection[int] | None = None
) -> Iterator[tuple[Trajectory, dict[str, Any]]]:
    """Read every trajectory with the values of extra columns.

    Args:
        newer: columns that files of before do not have: None there.
        only: numbers of the rows to read, from 0.

    Raises:
        DataError: as `read_trajectories`, or the file lacks one of the columns, or a row.
    """
    with _open(file) as parquet:
        names = parquet.schema_arrow.names
        missing = [name for name in columns if name not in names]
        if missing:
            raise DataError(f"{file} has no column '{missing[0]}': it holds trajectories, but not those of a step")
        for row in only or ():
            if not 0 <= row < parquet.metadata.num_rows:
                raise DataError(f"{file} has no row {row}: it has {parquet.metadata.num_rows}, from 0")
        wanted, unknown = ["trajectory", *columns, *(n for n in newer if n in names)], set(newer).difference(names)
        number = 0
        try:
            for place in range(parquet.metadata.num_row_groups):
                first, rows = number, parquet.metadata.row_group(place).num_rows
                chosen = None if only is None else [one - first for one in sorted(only) if first <= one < first + rows]
                if chosen == []:
                    number += rows
                    continue
                table = parquet.read_row_group(place, columns=wanted)
                for row in (table if chosen is None else table.take(chosen)).to_pylist():
                    number += 1
                    yield Trajectory.FromString(row.pop("trajectory")), row | dict.fromkeys(unknown)
                number = first + rows
        except (DecodeError, TypeError) as error:
            raise DataError(f"{file} row {number} holds no trajectory ({_describe(error)}): write it again") from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{file} is damaged after row {number} ({_describe(error)}): write it again") from None


def read_metadata(file: Path, key: bytes) -> bytes | None:
    """Read a value of a file's metadata; None without one.

    Raises:
        DataError: as `read_header`.
    """
    with _open(file) as parquet:
        value: bytes | None = parquet.schema_arrow.metadata.get(key)
        return value


def extract_question(prompt: str, end_of_turn: str) -> str:
    """Extract the question from a rendered prompt.

    It is what follows the instruction's last "Question: ", or else the last message, without the template's marks.
    """
    asked = prompt.rpartition("Question: ")[2]
    if not end_of_turn:
        return asked.strip()
    before = asked.rpartition(end_of_turn)[0] if end_of_turn in asked else asked
    last = before.rpartition(end_of_turn)[2]
    return _HEADER.sub("", last, count=1).strip() if _HEADER.match(last) else last.strip()


def read_exact_match(trajectory: Trajectory) -> float | None:
    """The exact match of a trajectory; None where it was not judged."""
    judged = trajectory.validation_score
    return judged.total if judged.status == Status.STATUS_OK else None


def count_searches(turns: Iterable[Turn]) -> int:
    """Count the searches that were carried out. One beyond `rollout.max_turns` is valid, and is not carried out."""
    return sum(turn.executed and turn.action == ActionKind.ACTION_KIND_SEARCH for turn in turns)


def explain_failure(status: Status.ValueType, detail: str, score: Score) -> str | None:
    """Explain why a trajectory with this status and score has no reward; None where it has one."""
    if status != Status.STATUS_OK:
        return f"failed: {detail or name_value(Status, status)}"
    if score.status != Status.STATUS_OK:
        return f"no reward: {score.detail or name_value(Status, score.status)}"
    return None


def _open(file: Path) -> pq.ParquetFile:
    remedy = "give a file of 'forage rollout sample' or of a run"
    try:
        parquet = pq.ParquetFile(file if isinstance(file, Path) else file.open("rb"), pre_buffer=True)
    except (pa.ArrowException, OSError, ValueError) as error:  # of a name that is no text, too
        raise DataError(f"{file} cannot be read as Parquet ({_describe(error)}): {remedy}") from None
    version = (parquet.schema_arrow.metadata or {}).get(TRAJECTORIES, b"").decode(errors="replace")
    if version != VERSION or "trajectory" not in parquet.schema_arrow.names:
        parquet.close()
        problem = (
            f"are trajectories of version {version!r}, not {VERSION!r}" if version else "are not complete trajectories"
        )
        raise DataError(f"the rows of {file} {problem}: {remedy}")
    return parquet


def _describe(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _measure(value: Any) -> int:
    """Bytes of a column's value in memory, roughly."""
    if isinstance(value, bytes | str):
        return len(value)
    return _NUMBER_BYTES * len(value) if isinstance(value, list) else _NUMBER_BYTES


def _row(trajectory: Trajectory, end_of_turn: str) -> dict[str, Any]:
    answers = [turn.content for turn in trajectory.turns if turn.action == ActionKind.ACTION_KIND_ANSWER]
    text = {True: "", False: ""}
    for span in trajectory.spans:
        text[span.role == Role.ROLE_PROMPT and not span.opening] += span.text
    score = trajectory.score
    return {
        "id": trajectory.id,
        "run_id": trajectory.run_id,
        "group_uid": trajectory.group_uid,
        "sample": trajectory.sample,
        "data_source": trajectory.data_source,
        "question": extract_question(text[True], end_of_turn),
        "prompt": text[True],
        "response": text[False],
        "answer": answers[-1] if answers else None,
        "targets": list(trajectory.ground_truth.targets),
        "status": name_value(Status, trajectory.status),
        "reason": explain_failure(trajectory.status, trajectory.status_detail, trajectory.score),
        "reward": score.reward or None,
        "score": score.total if score.status == Status.STATUS_OK else None,
        "em": read_exact_match(trajectory),
        "components": [{"name": c.name, "raw": c.raw, "weighted": c.weighted} for c in score.components],
        "turns": len(trajectory.turns),
        "searches": count_searches(trajectory.turns),
        "finished": trajectory.finished,
        "truncated": trajectory.truncated,
        "response_tokens": len(trajectory.loss_mask),
        "policy_version": max((segment.version for segment in trajectory.segments), default=None),
        "policy_version_min": min((segment.version for segment in trajectory.segments), default=None),
        "trajectory": trajectory.SerializeToString(),
    }
