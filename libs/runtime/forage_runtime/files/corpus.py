"""Reads the files of a corpus: JSON objects with `id`, `contents` (`"Title"`, newline, text) and any other fields.

A corpus is a file of JSON lines, gzip of these, or Parquet, whatever its name; or a folder of such files (`.jsonl`,
`.jsonl.gz`, `.parquet`), read in order of name.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

from forage_runtime.errors import DataError
from forage_runtime.files.parquet_rows import stream_parquet_rows

MAX_LINE_BYTES = 64 * 2**20
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_BOM = b"\xef\xbb\xbf"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
"""How files of these formats begin."""


def read_rows(path: Path) -> Generator[tuple[str, dict[str, Any], bytes]]:
    """Every passage in file order, checked: its location `file:line`, its fields, and these as JSON in UTF-8.

    Raises:
        DataError: a file cannot be read, or a line is not a passage; names the file, line (or Parquet row) and field.
    """
    try:
        for file in list_files(path):
            for number, line in enumerate(_read_lines(file), 1):
                if line.removeprefix(_BOM).strip():
                    where = f"{file}:{number}"
                    yield where, *_parse_row(line, where)
    except (OSError, EOFError, zlib.error) as error:
        raise make_unreadable_error(path, error) from None


def list_files(path: Path) -> list[Path]:
    """The files of a corpus: the file itself, or those of a folder, without hidden ones, as of macOS.

    Raises:
        DataError: a folder has none.
    """
    if not path.is_dir():
        return [path]
    names = (file for file in path.iterdir() if file.name.lower().endswith(_SUFFIXES))
    files = sorted(file for file in names if file.is_file() and not file.name.startswith("."))
    if not files:
        raise DataError(f"folder {path} cannot be read as a corpus: it has no {', '.join(_SUFFIXES)} file")
    return files


def make_unreadable_error(path: Path, error: Exception) -> DataError:
    """The error for files that the system or a decoder cannot read."""
    remedy = "set data.corpus to a JSONL or Parquet file, or make one with `forage data world`"
    return DataError(f"corpus {path} cannot be read ({getattr(error, 'strerror', None) or error}): {remedy}")


def _read_lines(file: Path) -> Iterator[bytes]:
    suffix = file.suffix.lower()
    if suffix == ".parquet" or _begins_with(file, _PARQUET):
        yield from stream_parquet_rows(file, "use `forage index build`, or write JSON lines")
        return
    with gzip.open(file) if suffix == ".gz" or _begins_with(file, _GZIP) else file.open("rb") as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{file} has a line of more than {MAX_LINE_BYTES} bytes: write one JSON object a line")
            yield line


def _begins_with(file: Path, magic: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(magic)) == magic


def _parse_row(line: bytes, where: str) -> tuple[dict[str, Any], bytes]:
    try:
        fields = json.loads(line.decode("utf-8-sig"), parse_constant=_reject_constant)
        # Encoding fails on a lone surrogate, which JSON allows but UTF-8 cannot represent.
        row = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({error.reason} at byte {error.start}): convert the file") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): write one JSON object a line") from None
    if not isinstance(fields, dict):
        raise DataError(f"{where} is a JSON {type(fields).__name__}, not an object: write one JSON object a line")
    id, contents = fields.get("id"), fields.get("contents")
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise _make_field_error(where, "id", id, "a text or a whole number")
    if not isinstance(contents, str) or not contents.strip():
        raise _make_field_error(where, "contents", contents, "the title, a newline and the text")
    return fields, row


def _make_field_error(where: str, field: str, value: object, expected: str) -> DataError:
    found = "missing or null" if value is None else repr(value)[:80]
    return DataError(f"{where}: field '{field}' is {found}: give {expected}")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
