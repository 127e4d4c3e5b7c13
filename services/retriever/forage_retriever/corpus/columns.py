"""Filter columns: which passages have one of the accepted values in a field.

A filter field is stored as its distinct values and, by value, the rows that have it, so a filter reads only the rows
that pass it. A passage whose field is a list has every value of it; one without the field passes no filter on it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forage_retriever.hits import Filters
from forage_runtime.errors import DataError, ForageError

MAX_VALUES = 1_000_000
"""Distinct values of a field: unlike passages, they are held in memory."""

_CACHED_BYTES = 64 * 2**20
_BLOCK = 2**20
_FLUSHED = 2**16
_PAIRS = "pairs.tmp"
_VALUES, _STARTS, _ROWS = "values.json", "starts.npy", "rows.npy"


class UnknownFieldError(ForageError):
    """The index was not built to filter by this field."""


class Columns:
    """The filter fields of a corpus, mapped into memory. Thread-safe."""

    def __init__(self, folder: Path, fields: Sequence[str], passages: int) -> None:
        self.fields = tuple(fields)
        self._passages = passages
        self._columns = {name: _Column(folder / str(place)) for place, name in enumerate(fields)}
        self._masks: OrderedDict[Filters, NDArray[np.bool_]] = OrderedDict()
        self._kept = max(_CACHED_BYTES // max(passages, 1), 1)
        self._lock = threading.Lock()

    def compute_mask(self, filters: Filters) -> NDArray[np.bool_]:
        """The mask [passages] of rows that pass all filters, read-only; recent ones are cached.

        Raises:
            UnknownFieldError: as `check_field`.
        """
        for field, _ in filters:
            self.check_field(field)
        with self._lock:
            mask = self._masks.get(filters)
            if mask is None:
                mask = self._masks[filters] = self._mask(filters)
            self._masks.move_to_end(filters)
            if len(self._masks) > self._kept:
                self._masks.popitem(last=False)
        return mask

    def list_filter_terms(self, fields: Mapping[str, Any]) -> list[str]:
        """The filter term of every value in these fields of a passage."""
        return [
            format_filter_term(name, value) for name in self.fields for value in extract_values(fields.get(name), name)
        ]

    def find_rows(self, field: str, value: str) -> NDArray[np.uint32]:
        """The rows that have this value, in order.

        Raises:
            UnknownFieldError: as `check_field`.
        """
        self.check_field(field)
        return self._columns[field].find_rows(value)

    def check_field(self, field: str) -> None:
        """
        Raises:
            UnknownFieldError: there are no filters on this field; names those that there are.
        """
        if field not in self._columns:
            known = f"those of this index are {', '.join(self.fields)}" if self.fields else "this index has none"
            raise UnknownFieldError(f"filter field {field!r} is unknown: {known} (retriever.filter_fields)")

    def _mask(self, filters: Filters) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = np.ones(self._passages, np.bool_)
        for field, accepted in filters:
            passing: NDArray[np.bool_] = np.zeros(self._passages, np.bool_)
            for value in accepted:
                passing[self.find_rows(field, value)] = True
            mask &= passing
        mask.flags.writeable = False
        return mask


class ColumnsWriter:
    """Collects the filter fields of passages, in bounded memory."""

    def __init__(self, folder: Path, fields: Sequence[str]) -> None:
        self._columns = {name: _ColumnWriter(folder / str(place), name) for place, name in enumerate(fields)}

    def add_passage(self, row: int, fields: Mapping[str, Any], where: str) -> None:
        """Add the values of one passage; rows come in order.

        Raises:
            DataError: a value is not a text, number, boolean or list of these.
        """
        for name, column in self._columns.items():
            try:
                column.add_values(row, extract_values(fields.get(name), name))
            except ValueError as error:
                raise DataError(f"{where}: {error}") from None

    def finish(self) -> None:
        """Write the columns to disk."""
        for column in self._columns.values():
            column.finish()


def format_filter_term(field: str, value: str) -> str:
    """The term by which the BM25 index knows a value of a field."""
    return f"{field}={value}"


def extract_values(value: Any, field: str) -> list[str]:
    """The values of a field as text; numbers and booleans as JSON writes them.

    Raises:
        ValueError: it is an object, or a list that holds one.
    """
    texts = []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, bool | int | float):
            texts.append(json.dumps(one))
        elif one is not None:
            raise ValueError(f"field {field!r} is {repr(value)[:80]}: give a text, a number, or a list of these")
    return list(dict.fromkeys(texts))


class _Column:
    def __init__(self, folder: Path) -> None:
        self._places = {
            value: place for place, value in enumerate(json.loads((folder / _VALUES).read_text(encoding="utf-8")))
        }
        self._starts = np.load(folder / _STARTS)
        self._rows = np.load(folder / _ROWS, mmap_mode="r") if self._starts[-1] else np.empty(0, np.uint32)

    def find_rows(self, value: str) -> NDArray[np.uint32]:
        place = self._places.get(value)
        if place is None:
            return np.empty(0, np.uint32)
        rows: NDArray[np.uint32] = self._rows[self._starts[place] : self._starts[place + 1]]
        return rows


class _ColumnWriter:
    """Writes pairs (value, row) as they come; at the end a counting sort over blocks orders them by value."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._name = name
        self._places: dict[str, int] = {}
        self._counts: list[int] = []
        self._pairs: list[tuple[int, int]] = []
        self._file = (folder / _PAIRS).open("w+b")

    def add_values(self, row: int, values: Sequence[str]) -> None:
        for value in values:
            place = self._places.setdefault(value, len(self._places))
            if place == len(self._counts):
                if place >= MAX_VALUES:
                    raise ValueError(f"field {self._name!r} has more than {MAX_VALUES} values: filter by another field")
                self._counts.append(0)
            self._counts[place] += 1
            self._pairs.append((place, row))
        if len(self._pairs) >= _FLUSHED:
            self._flush()

    def finish(self) -> None:
        self._flush()
        starts = np.concatenate([[0], np.cumsum(self._counts, dtype=np.int64)]).astype(np.int64)
        if total := int(starts[-1]):
            self._sort(np.memmap(self._file, np.uint32, "r", shape=(total, 2)), starts[:-1].copy())
        np.save(self._folder / _STARTS, starts)
        (self._folder / _VALUES).write_text(json.dumps(list(self._places), ensure_ascii=False), encoding="utf-8")
        self._file.close()
        (self._folder / _PAIRS).unlink()

    def _flush(self) -> None:
        np.array(self._pairs, np.uint32).tofile(self._file)
        self._file.flush()
        self._pairs.clear()

    def _sort(self, pairs: NDArray[np.uint32], free: NDArray[np.int64]) -> None:
        rows = np.lib.format.open_memmap(self._folder / _ROWS, "w+", np.uint32, (len(pairs),))
        for begin in range(0, len(pairs), _BLOCK):
            block = pairs[begin : begin + _BLOCK]
            order = np.argsort(block[:, 0], kind="stable")
            places, counts = np.unique(block[order, 0], return_counts=True)
            within = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
            rows[np.repeat(free[places], counts) + within] = block[order, 1]
            free[places] += counts
        rows.flush()
