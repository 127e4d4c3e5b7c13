"""Reads a corpus as a stream of JSON objects with `id`, `contents` (`"Title"`, newline, text) and any other fields.

A corpus is JSON lines (`.jsonl`, `.jsonl.gz`), Parquet (`.parquet`), or a folder of such files, read in order of name.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from forage_common.errors import DataError
from forage_common.files.parquet_rows import stream_parquet_rows
from forage_retriever.artifacts import hash_files

MAX_LINE_BYTES = 64 * 2**20
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage.

    Attributes:
        id: as text, also where the file has a number.
        contents: title first.
        fields: the whole JSON object.
        row: the JSON object as bytes, ready to be sent.
    """

    id: str
    contents: str
    fields: dict[str, Any]
    row: bytes

    @classmethod
    def from_row(cls, row: bytes) -> Passage:
        """The passage of a row that was checked when it was stored."""
        fields = json.loads(row)
        return cls(str(fields["id"]), fields["contents"], fields, row)


def split_contents(contents: str) -> tuple[str, str]:
    """The title without its quotes, and the text after the first line."""
    title, _, text = contents.partition("\n")
    return title.strip().strip('"').strip(), text.strip()


def read_passages(path: Path) -> Iterator[Passage]:
    """Every passage in file order, checked; duplicate ids are found when the passages are stored.

    Raises:
        DataError: a file cannot be read, or a line is not a passage; names the file, line (or Parquet row) and field.
    """
    for _, passage in read_located_passages(path):
        yield passage


def read_located_passages(path: Path) -> Iterator[tuple[str, Passage]]:
    """As `read_passages`, each with its location `file:line`."""
    try:
        for file in list_files(path):
            for number, line in enumerate(_read_lines(file), 1):
                if line.strip():
                    where = f"{file}:{number}"
                    yield where, _parse_passage(line, where)
    except (OSError, EOFError, zlib.error) as error:
        raise _make_unreadable_error(path, error) from None


def hash_corpus(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of the files of a corpus; `progress` gets the bytes read since its last call.

    Raises:
        DataError: a file cannot be read.
    """
    try:
        return hash_files(list_files(path), progress)
    except OSError as error:
        raise _make_unreadable_error(path, error) from None


def list_files(path: Path) -> list[Path]:
    """The files of a corpus: the file itself, or those of a folder."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    if not files:
        raise DataError(f"folder {path} cannot be read as a corpus: it has no {', '.join(_SUFFIXES)} file")
    return files


def _read_lines(file: Path) -> Iterator[bytes]:
    if file.suffix == ".parquet":
        yield from stream_parquet_rows(file, "use `forage index build`, or write JSON lines")
        return
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{file} has a line of more than {MAX_LINE_BYTES} bytes: write one JSON object a line")
            yield line


def _parse_passage(line: bytes, where: str) -> Passage:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({error.reason} at byte {error.start}): convert the file") from None
    try:
        fields = json.loads(text, parse_constant=_reject_constant)
        # Encoding fails on a lone surrogate, which JSON allows but UTF-8 cannot represent.
        row = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): write one JSON object a line") from None
    if not isinstance(fields, dict):
        raise DataError(f"{where} is a JSON {type(fields).__name__}, not an object: write one JSON object a line")
    return Passage(_read_id(fields, where), _read_contents(fields, where), fields, row)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _read_id(fields: dict[str, Any], where: str) -> str:
    id = fields.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise DataError(f"{where}: field 'id' is {_format_value(id)}: give a text or a whole number")
    return str(id)


def _read_contents(fields: dict[str, Any], where: str) -> str:
    contents = fields.get("contents")
    if not isinstance(contents, str) or not contents.strip():
        raise DataError(
            f"{where}: field 'contents' is {_format_value(contents)}: give the title, a newline and the text"
        )
    return contents


def _format_value(value: object) -> str:
    return "missing or null" if value is None else repr(value)[:80]


def _make_unreadable_error(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    remedy = "set data.corpus to a JSONL or Parquet file, or make one with `forage data world`"
    return DataError(f"corpus {path} cannot be read ({reason}): {remedy}")
