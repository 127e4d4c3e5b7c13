"""Passages of a corpus, as a stream from its files; `forage_runtime.files.corpus` has their formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_retriever.artifacts import hash_files
from forage_runtime.files.corpus import list_files, make_unreadable_error, read_rows


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
        DataError: see `read_rows`.
    """
    for _, passage in read_located_passages(path):
        yield passage


def read_located_passages(path: Path) -> Iterator[tuple[str, Passage]]:
    """As `read_passages`, each with its location `file:line`."""
    for where, fields, row in read_rows(path):
        yield where, Passage(str(fields["id"]), fields["contents"], fields, row)


def hash_corpus(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of the files of a corpus; `progress` gets the bytes read since its last call.

    Raises:
        DataError: a file cannot be read.
    """
    try:
        return hash_files(list_files(path), progress)
    except OSError as error:
        raise make_unreadable_error(path, error) from None
