"""The values of trajectories that lists show, filters compare and orders sort by, read from their files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from upath import UPath

from forage_console.models.base import Author
from forage_console.store.files import DataFile
from forage_records.json_text import parse_json
from forage_runtime.errors import DataError

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("place", pa.string()),
        ("step", pa.int64()),
        ("row", pa.int64()),
        ("uid", pa.string()),
        ("sample", pa.int64()),
        ("data_source", pa.string()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("targets", pa.list_(pa.string())),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("reward", pa.float64()),
        ("em", pa.float64()),
        ("advantage", pa.float64()),
        ("search_advantage", pa.float64()),
        ("mismatch", pa.float64()),
        ("trained", pa.bool_()),
        ("searches", pa.int64()),
        ("turns", pa.int64()),
        ("tokens", pa.int64()),
        ("truncated", pa.bool_()),
        ("finished", pa.bool_()),
        ("version_min", pa.int64()),
        ("version_max", pa.int64()),
        ("line_begin", pa.int64()),
    ]
)
"""Columns of the table. line_begin: bytes before a validation's line."""
_OF_FILE = {
    "uid": "group_uid",
    "reward": "score",
    "advantage": "advantage_mean",
    "mismatch": "mismatch_max",
    "tokens": "response_tokens",
    "version_min": "policy_version_min",
    "version_max": "policy_version",
}
"""Column → name in a step file, where it has another one there."""
_OWN = ("id", "place", "step", "row", "line_begin")


def read_values(file: DataFile) -> pa.Table:
    """Read the values of every trajectory of a file.

    Raises:
        OSError, pyarrow.ArrowException, ForageError, ValueError: it is gone or damaged.
    """
    return _read_step_values(file) if file.step is not None else _read_validation_values(file)


def read_texts(file: DataFile) -> Iterator[list[tuple[int, str]]]:
    """Read what a search for text looks at, some rows at a time: (row, question and response).

    Raises:
        OSError, pyarrow.ArrowException, ValueError: it is gone or damaged.
    """
    if file.step is None:
        rows = [row for _, row in read_lines(file.path) if row is not None]
        yield [(number, join_text(row)) for number, row in enumerate(rows)]
        return
    row = 0
    with file.open_parquet() as parquet:
        wanted = ["question", "response"]
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, columns=wanted, use_threads=False)
            asked, written = (table[name].to_pylist() for name in wanted)
            yield [
                (row + number, f"{one}\n{other}")
                for number, (one, other) in enumerate(zip(asked, written, strict=True))
            ]
            row += table.num_rows


def join_text(row: dict[str, Any]) -> str:
    """Question and response of a validation's line."""
    response = "".join(span["text"] for span in list_spans(row) if span["role"] != Author.PROMPT)
    return f"{row.get('question', '')}\n{response}"


def list_spans(row: dict[str, Any]) -> list[dict[str, str]]:
    """List the spans of a validation's line, without what is none."""
    spans = row.get("spans")
    return [
        span
        for span in (spans if isinstance(spans, list) else ())
        if isinstance(span, dict) and span.get("role") in list(Author) and isinstance(span.get("text"), str)
    ]


def read_line(file: UPath, begin: int) -> dict[str, Any]:
    """Read the line of a validation's file that begins there.

    Raises:
        OSError, ValueError, RecursionError: it is gone or damaged.
    """
    with file.open("rb") as stream:
        stream.seek(begin)
        found: dict[str, Any] = parse_json(stream.readline())
        return found


def read_lines(file: UPath) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Read where each line of a validation's file begins, and what it holds; None of one that holds no object.

    It ends with a line that is damaged, or still being written.
    """
    begin = 0
    with file.open("rb") as stream:
        for line in stream:
            try:
                row = parse_json(line)
            except (ValueError, RecursionError):
                yield begin, None
                return
            yield begin, row if isinstance(row, dict) else None
            begin += len(line)


def _read_step_values(file: DataFile) -> pa.Table:
    with file.open_parquet() as parquet:
        if "advantage_mean" not in parquet.schema_arrow.names:
            raise DataError("an older version of Forage wrote it: 'forage trajectories --step' reads it")
        wanted = {name: _OF_FILE.get(name, name) for name in SCHEMA.names if name not in _OWN}
        table = parquet.read(columns=list(wanted.values()), use_threads=False)
    count = table.num_rows
    columns = {name: table[other].cast(SCHEMA.field(name).type) for name, other in wanted.items()}
    return _complete(file, columns, count)


def _complete(file: DataFile, columns: dict[str, Any], count: int) -> pa.Table:
    rows = pa.array(range(count), pa.int64())
    columns |= {
        "id": pc.add(rows, file.identify(0)),
        "place": pa.repeat(pa.scalar(file.place), count),
        "step": pa.repeat(pa.scalar(file.step, pa.int64()), count),
        "row": rows,
    }
    arrays = [columns[field.name] if field.name in columns else pa.nulls(count, field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _read_validation_values(file: DataFile) -> pa.Table:
    rows = [_describe_line(begin, row) for begin, row in read_lines(file.path) if row is not None]
    columns = {name: pa.array([row[name] for row in rows], SCHEMA.field(name).type) for name in rows[0]} if rows else {}
    return _complete(file, columns, len(rows))


def _describe_line(begin: int, row: dict[str, Any]) -> dict[str, Any]:
    uid, turns, targets = str(row.get("uid", "")), _read_list(row, "turns"), _read_list(row, "targets")
    failed = bool(row.get("failed"))
    values = {
        "line_begin": begin,
        "uid": uid,
        "sample": row.get("sample"),
        "data_source": row.get("data_source") or uid.rsplit("/", 3)[0],
        "question": str(row.get("question", "")),
        "answer": row.get("answer"),
        "targets": [str(target) for target in targets],
        "status": row.get("status") or ("INTERNAL" if failed else "OK"),
        "reason": row.get("reason") or ("failed: it was not answered" if failed else None),
        "reward": row.get("reward"),
        "em": row.get("em"),
        "searches": row.get("searches", sum(map(_is_search, turns))),
        "turns": len(turns),
        "tokens": row.get("response_tokens"),
        "truncated": bool(row.get("truncated")),
        "finished": bool(row.get("finished")),
        "version_min": row.get("policy_version_min"),
        "version_max": row.get("policy_version"),
    }
    known = {name: value for name, value in values.items() if _fits(value, SCHEMA.field(name).type)}
    return dict.fromkeys(values) | {"sample": 0, "searches": 0, "status": "OK", "data_source": ""} | known


def _read_list(row: dict[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else []


def _is_search(turn: object) -> bool:
    return isinstance(turn, dict) and turn.get("action") == "ACTION_KIND_SEARCH" and bool(turn.get("executed"))


def _fits(value: object, kind: pa.DataType) -> bool:
    """Whether a value of a JSON line has the type of its column; a file of another version may have others."""
    if isinstance(value, bool):
        return bool(kind == pa.bool_())
    if isinstance(value, int):
        return abs(value) < 2**53 and kind in (pa.int64(), pa.float64())
    return isinstance(value, {pa.string(): str, pa.float64(): float}.get(kind, list))
