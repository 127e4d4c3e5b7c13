"""Reads a corpus as a stream: JSON objects with `id` and `contents` = `"Title"` newline text, other fields kept.

A corpus is JSON lines (`.jsonl`, or `.jsonl.gz`), Parquet (`.parquet`), or a folder of such files, read by name.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from forage_common.errors import DataError

PARQUET_READER = "FORAGE_PARQUET_PYTHON"
"""Names an interpreter that can read Parquet; the `forage` command sets it to its own."""

MAX_LINE_BYTES = 64 * 2**20
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_HASHED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage.

    Attributes:
        id: a number in the file is its decimal text here.
        contents: title first.
        fields: the whole JSON object.
        row: the same as bytes, ready to be sent.
    """

    id: str
    contents: str
    fields: dict[str, Any]
    row: bytes

    @classmethod
    def of(cls, row: bytes) -> Passage:
        """The passage of a row that was checked before."""
        fields = json.loads(row)
        return cls(str(fields["id"]), fields["contents"], fields, row)


def title_and_text(contents: str) -> tuple[str, str]:
    """The title without its quotes, and what follows the first line."""
    title, _, text = contents.partition("\n")
    return title.strip().strip('"').strip(), text.strip()


def passages(path: Path) -> Iterator[Passage]:
    """Every passage in file order, checked; that ids differ is left to who keeps them.

    Raises:
        DataError: a file cannot be read, or a line is not a passage; names file, line (or Parquet row) and field.
    """
    for _, passage in numbered(path):
        yield passage


def numbered(path: Path) -> Iterator[tuple[str, Passage]]:
    """As `passages`, each with its place: `file:line`."""
    try:
        for file in files(path):
            for number, line in enumerate(_lines(file), 1):
                if line.strip():
                    where = f"{file}:{number}"
                    yield where, _parse(line, where)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None


def digest(path: Path) -> str:
    """SHA-256 of the bytes of a corpus as it lies on disk.

    Raises:
        DataError: a file cannot be read.
    """
    found = hashlib.sha256()
    try:
        for file in files(path):
            with file.open("rb") as stream:
                while block := stream.read(_HASHED_BYTES):
                    found.update(block)
    except OSError as error:
        raise _unreadable(path, error) from None
    return found.hexdigest()


def files(path: Path) -> list[Path]:
    """The files of a corpus: itself, or those of a folder."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    if not found:
        raise DataError(f"folder {path} cannot be read as a corpus: it has no {', '.join(_SUFFIXES)} file")
    return found


def _lines(file: Path) -> Iterator[bytes]:
    if file.suffix == ".parquet":
        yield from _parquet_lines(file)
        return
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{file} has a line of more than {MAX_LINE_BYTES} bytes: write one JSON object a line")
            yield line


def _parquet_lines(file: Path) -> Iterator[bytes]:
    # pyarrow is as large as all else here, so its reader is a process of an environment that has it.
    python = os.environ.get(PARQUET_READER) or (sys.executable if importlib.util.find_spec("pyarrow") else "")
    if not python:
        raise DataError(f"{file} is Parquet, which needs pyarrow here: use `forage index build`, or write JSON lines")
    file.open("rb").close()
    command = [python, "-m", "forage_common.files.parquet_rows", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        try:
            yield from reader.stdout
            problem = reader.stderr.read().decode(errors="replace").strip()
        except GeneratorExit:
            reader.kill()
            raise
    if reader.returncode:
        raise DataError(problem or f"{file} cannot be read as Parquet")


def _parse(line: bytes, where: str) -> Passage:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({error.reason} at byte {error.start}): convert the file") from None
    try:
        fields = json.loads(text, parse_constant=_no_constant)
        # Fails on half a surrogate pair, which is JSON but no text that could be sent.
        row = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): write one JSON object a line") from None
    if not isinstance(fields, dict):
        raise DataError(f"{where} is a JSON {type(fields).__name__}, not an object: write one JSON object a line")
    return Passage(_id(fields, where), _contents(fields, where), fields, row)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _id(fields: dict[str, Any], where: str) -> str:
    id = fields.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise DataError(f"{where}: field 'id' is {_shown(id)}: give a text or a whole number")
    return str(id)


def _contents(fields: dict[str, Any], where: str) -> str:
    contents = fields.get("contents")
    if not isinstance(contents, str) or not contents.strip():
        raise DataError(f"{where}: field 'contents' is {_shown(contents)}: give the title, a newline and the text")
    return contents


def _shown(value: object) -> str:
    return "missing or null" if value is None else repr(value)[:80]


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    remedy = "set data.corpus to a JSONL or Parquet file, or make one with `forage data world`"
    return DataError(f"corpus {path} cannot be read ({reason}): {remedy}")
