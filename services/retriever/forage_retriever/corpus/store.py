"""The corpus store, mapped into memory: rows one after another, their offsets, and the filter columns."""

from __future__ import annotations

import hashlib
import json
import mmap
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from forage_retriever.corpus.columns import Columns, ColumnsWriter
from forage_retriever.corpus.read import Passage
from forage_runtime.errors import DataError

META_FILE, ROWS_FILE, OFFSETS_FILE, COLUMNS_FOLDER = "corpus.json", "rows.bin", "offsets.bin", "columns"
_HASHES_FILE = "hashes.tmp"
_FLUSHED = 2**16
_SORTED = 2**22
"""Hashes of ids that are sorted at once."""

T = TypeVar("T")


class DuplicateIdError(DataError):
    """Two passages have this id."""

    def __init__(self, id: str) -> None:
        super().__init__(f"two passages have the id {id!r}: make ids unique")
        self.id = id


class _View(Sequence[T]):
    """A sequence that reads an item when it is indexed; slices are lists."""

    def __init__(self, rows: range, read: Callable[[int], T]) -> None:
        self._rows = rows
        self._read = read

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return [self._read(row) for row in self._rows[place]]
        return self._read(self._rows[place])


class Corpus(_View[Passage]):
    """All passages in file order, identified by row number. Thread-safe.

    Attributes:
        rows: each passage's whole JSON object as bytes.
        ids: each passage's id.
        contents: each passage's text, title first.
        columns: the filter columns.
        digest: SHA-256 of the rows, each with a newline: of the passages, whatever the format of their file.
        bytes: size of all rows.
    """

    def __init__(self, folder: Path) -> None:
        """Map a folder that `CorpusWriter` wrote.

        Raises:
            DataError: the folder is damaged.
        """
        try:
            meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
            count, self.digest = int(meta["passages"]), str(meta["digest"])
            with (folder / ROWS_FILE).open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            offsets: NDArray[np.uint64] = np.memmap(folder / OFFSETS_FILE, "<u8", "r")
            if len(offsets) != count + 1 or int(offsets[-1]) != len(data):
                raise ValueError(f"{len(data)} bytes of rows are not the {count} passages of {META_FILE}")
            self.columns = Columns(folder / COLUMNS_FOLDER, meta["filter_fields"], count)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"corpus {folder} cannot be read ({error}): delete its index and build it again") from None

        def row(place: int) -> bytes:
            return data[int(offsets[place]) : int(offsets[place + 1])]

        self.bytes = len(data)
        self.rows = _View(range(count), row)
        self.ids = _View(range(count), lambda place: self[place].id)
        self.contents = _View(range(count), lambda place: self[place].contents)
        super().__init__(range(count), lambda place: Passage.from_row(row(place)))


class CorpusWriter:
    """Writes a corpus to an empty folder, passage by passage, in bounded memory."""

    def __init__(self, folder: Path, filter_fields: Sequence[str] = ()) -> None:
        self._folder = folder
        self._fields = tuple(filter_fields)
        self._columns = ColumnsWriter(folder / COLUMNS_FOLDER, filter_fields)
        self._rows = (folder / ROWS_FILE).open("wb")
        self._offsets = (folder / OFFSETS_FILE).open("wb")
        self._hashes = (folder / _HASHES_FILE).open("w+b")
        self._new_offsets, self._new_hashes = array("Q", [0]), array("q")
        self._digest = hashlib.sha256()
        self._end = 0
        self._count = 0

    def add_passage(self, passage: Passage, where: str = "") -> None:
        """Add the next passage; `where` is its location for errors.

        Raises:
            DataError: the value of a filter field cannot be filtered by.
        """
        self._columns.add_passage(self._count, passage.fields, where or f"passage {passage.id!r}")
        self._rows.write(passage.row)
        self._digest.update(passage.row + b"\n")
        self._end += len(passage.row)
        self._count += 1
        self._new_offsets.append(self._end)
        self._new_hashes.append(hash(passage.id))
        if len(self._new_hashes) >= _FLUSHED:
            self._flush()

    def finish(self) -> Corpus:
        """Flush the files and check that ids are unique.

        Raises:
            DuplicateIdError: two passages have the same id.
            DataError: there is no passage.
        """
        if not self._count:
            raise DataError("the corpus has no passages: write one JSON object with id and contents a line")
        self._flush()
        self._columns.finish()
        meta = {"passages": self._count, "digest": self._digest.hexdigest(), "filter_fields": self._fields}
        (self._folder / META_FILE).write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")
        for file in (self._rows, self._offsets):
            file.close()
        corpus = Corpus(self._folder)
        for first, second in _find_equal_hashes(np.memmap(self._hashes, np.int64, "r")):
            if corpus.ids[first] == corpus.ids[second]:
                raise DuplicateIdError(corpus.ids[first])
        self._hashes.close()
        (self._folder / _HASHES_FILE).unlink()
        return corpus

    def _flush(self) -> None:
        for numbers, file in ((self._new_offsets, self._offsets), (self._new_hashes, self._hashes)):
            numbers.tofile(file)
            file.flush()
            del numbers[:]


def _find_equal_hashes(hashes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Pairs of rows with equal hashes; sorts one part of the range of hashes after another, to bound memory."""
    parts = len(hashes) // _SORTED + 1
    blocks = range(0, len(hashes), _SORTED)
    members: list[NDArray[np.int64]]
    for part in range(parts):
        members = [block + np.flatnonzero(hashes[block : block + _SORTED] % parts == part) for block in blocks]
        rows = np.concatenate(members)
        rows = rows[np.argsort(hashes[rows], kind="stable")]
        for place in np.flatnonzero(hashes[rows[1:]] == hashes[rows[:-1]]):
            yield int(rows[place]), int(rows[place + 1])
