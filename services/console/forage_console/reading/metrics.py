"""The metrics of a run's steps, in columns, read on from where the last reading ended."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType
from typing import BinaryIO

from pydantic_core import from_json
from upath import UPath

from forage_console.reading.files import NONE, Row, describe, read_stamp, to_number
from forage_records.comparison import DIGESTS

_TAIL = 64
_SECONDS = "seconds"
_SKIPPED = frozenset({"step", "total_steps", "time"})
_SMALL = 256 * 1024
_LONGEST_LINE = 1024 * 1024
NAN = math.nan


class StepMetrics:
    """The lines of a metrics.jsonl as columns; NaN where a step has no value.

    Attributes:
        steps, time: of each line; columns: name → values, shorter than `steps` where the last steps have none.
        guards: (step, name) of guards that tripped.
        digests: step → digests of its tokens and weights.
        total: steps of the whole run, None where no line says so.
        problem: why a part cannot be read.
    """

    def __init__(self, file: UPath) -> None:
        self._file = file
        self._clear()

    def _clear(self) -> None:
        self._stamp, self._offset, self._tail, self._damaged = NONE, 0, b"", 0
        self.steps, self.time = array("q"), array("d")
        self.columns: dict[str, array[float]] = {}
        self.guards: list[tuple[int, str]] = []
        self.digests: dict[int, Row] = {}
        self.total: int | None = None
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        if self._problem is None and self._damaged:
            return f"{self._damaged} lines of {self._file.name} cannot be read: they are left out"
        return self._problem

    def refresh(self) -> None:
        """Read what was written since the last time, or the whole file where it was written anew."""
        stamp = read_stamp(self._file)
        if stamp == self._stamp:
            return
        if stamp == NONE:
            self._clear()
            return
        _, size, inode = stamp
        try:
            with self._file.open("rb") as stream:
                # An object store has no numbers of files, and objects that are only ever replaced.
                if not inode or inode != self._stamp[2] or size < self._offset or not self._continues(stream):
                    self._clear()
                    stream.seek(0)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break  # it is still being written
                    self._take(line)
                    self._offset += len(line)
                    self._tail = (self._tail + line)[-_TAIL:]
        except OSError as error:
            self._clear()
            self._problem = describe(self._file, error)
            return
        self._problem = None
        self._stamp = stamp

    def _continues(self, stream: BinaryIO) -> bool:
        """Whether the file still has what was read last; leaves the stream behind it."""
        stream.seek(self._offset - len(self._tail))
        return stream.read(len(self._tail)) == self._tail

    def _take(self, line: bytes) -> None:
        row = parse_line(line)
        if row is None:
            self._damaged += bool(line.strip())
            return
        step = int(row["step"])
        while self.steps and self.steps[-1] >= step:  # taken again
            self._drop()
        self.steps.append(step)
        self.time.append(_finite(row.get("time")))
        total = to_number(row.get("total_steps"))
        self.total = int(total) if total is not None else self.total
        place = len(self.steps) - 1
        for name, value in _flatten(row):
            column = self.columns.setdefault(name, array("d"))
            if len(column) < place:
                column.extend([NAN] * (place - len(column)))
            column.append(value)
        guards = row.get("guards")
        self.guards += [(step, str(name)) for name in guards] if isinstance(guards, list) else []
        if digests := {name: row[name] for name in DIGESTS if name in row}:
            self.digests[step] = digests

    def _drop(self) -> None:
        step = self.steps.pop()
        self.time.pop()
        for column in self.columns.values():
            del column[len(self.steps) :]
        self.guards = [found for found in self.guards if found[0] != step]
        self.digests.pop(step, None)

    def read_column(self, name: str, begin: int = 0) -> list[float | None]:
        """The values of a metric from the line `begin` on; None where a step has none."""
        column = self.columns.get(name, array("d"))
        values: list[float | None] = [None if value != value else value for value in column[begin:]]
        return values + [None] * (len(self.steps) - begin - len(values))

    def read_recent(self, name: str, count: int = 20) -> list[float]:
        """The values of a metric in the last steps that have one."""
        begin = max(0, len(self.steps) - count)
        return [value for value in self.columns.get(name, array("d"))[begin:] if not math.isnan(value)]

    def read_last(self) -> dict[str, float | None]:
        """The metrics of the last step."""
        last = len(self.steps) - 1
        return {name: self.read_column(name, last)[0] for name in self.columns} if self.steps else {}


def parse_line(line: bytes) -> Row | None:
    """Parse a line of metrics; None of one that is damaged or has no step."""
    try:
        row = from_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    step = to_number(row.get("step"))
    return row if step is not None and 0 <= step < 2**53 else None


@dataclass(frozen=True)
class Sample:
    """Lines of a file. spread: all of a small file, else evenly spread ones; recent: at least the last 20."""

    spread: Sequence[Row] = ()
    recent: Sequence[Row] = ()


def sample_lines(file: UPath, size: int, count: int) -> Sample:
    """Read a small file's lines, or about `count` lines of a large one and its end."""
    with file.open("rb") as stream:
        if size <= _SMALL:
            rows = _parse_lines(stream.read().split(b"\n"))
            return Sample(rows, rows)
        first = stream.readline(_LONGEST_LINE)
        window = 2 * len(first) + 4096
        spread = [first]
        for place in range(1, count):
            stream.seek(size * place // count)
            spread += stream.read(window).split(b"\n")[1:2]
        stream.seek(max(0, size - 20 * window))
        recent = _parse_lines(stream.read().split(b"\n")[1:])
    return Sample(_parse_lines(spread) + recent[-1:], recent)


def average(values: Sequence[float | None], count: int) -> list[float | None]:
    """Average values into at most `count` of equal width; None where all are unknown."""
    if len(values) <= count:
        return list(values)
    edges = [place * len(values) // count for place in range(count + 1)]
    parts = ([v for v in values[a:b] if v is not None] for a, b in pairwise(edges))
    return [sum(part) / len(part) if part else None for part in parts]


def _parse_lines(lines: Iterable[bytes]) -> list[Row]:
    """Parse lines; of a step that was taken again the last."""
    steps = {row["step"]: row for line in lines if (row := parse_line(line)) is not None}
    return [steps[step] for step in sorted(steps)]


def _flatten(row: Row) -> Iterable[tuple[str, float]]:
    for name, value in row.items():
        if name == _SECONDS and isinstance(value, dict):
            yield from ((f"{_SECONDS}.{part}", _finite(spent)) for part, spent in value.items())
        elif name not in _SKIPPED and type(value) in (int, float, NoneType):
            yield name, _finite(value)


def _finite(value: object) -> float:
    number = to_number(value)
    return NAN if number is None else number
