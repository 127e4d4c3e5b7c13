"""Reading a run's history: the operations that its processes recorded, see `forage_queue.streams.history`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forage_queue.streams.history import FOLDER, read_boot
from forage_runtime.errors import DataError

RESULTS = OK, REFUSED, ERROR, UNKNOWN = "ok", "refused", "error", "unknown"
CLOCK_SKEW_S = 1.0
"""Difference between the times of day of two machines below which the order of two operations is not known."""


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation and when it happened: at one moment between `began` and `ended`, in seconds.

    ended: infinite where the operation may still be carried out after the process gave up or died.
    result: `ok`, `refused` (it changed nothing), `unknown` (its process died) or `error`; the last two may have
    happened. clock: operations with the same one can be ordered exactly.
    """

    kind: str
    process: str
    number: int
    clock: str
    began: float
    ended: float
    result: str
    fields: dict[str, Any]
    error: str = ""

    @property
    def happened(self) -> bool:
        return self.result == OK

    @property
    def may_have_happened(self) -> bool:
        return self.result != REFUSED

    def precedes(self, other: Operation) -> bool:
        """Whether this one was over before the other began."""
        return self.ended + self._margin(other) < other.began

    def began_before(self, other: Operation) -> bool:
        """Whether this one may have begun before the other did."""
        return self.began - self._margin(other) <= other.began

    def ended_before(self, other: Operation) -> bool:
        """Whether this one may have been over when the other began."""
        return self.ended - self._margin(other) <= other.began

    def _margin(self, other: Operation) -> float:
        return 0.0 if self.clock == other.clock else CLOCK_SKEW_S

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def describe(self, origin: float) -> str:
        """Describe it on a line; times are seconds after `origin`."""
        until = "?" if math.isinf(self.ended) else f"{self.ended - origin:.6f}"
        shown = {name: value for name, value in self.fields.items() if value not in ([], "", None)}
        what = json.dumps(shown, ensure_ascii=False, separators=(", ", "="))[1:-1].replace('"', "")
        result = f"{self.result} ({self.error})" if self.error else self.result
        return f"[{self.began - origin:.6f}, {until}] {self.process} #{self.number} {self.kind} {what} → {result}"


@dataclass
class History:
    """All operations of a run in the order in which they began, and what is wrong with the files themselves."""

    operations: list[Operation]
    processes: int = 0
    gaps: list[str] = field(default_factory=list)

    @property
    def origin(self) -> float:
        """When the first operation began."""
        return self.operations[0].began if self.operations else 0.0

    def select(self, *kinds: str) -> list[Operation]:
        """The operations of these kinds that may have happened."""
        return [one for one in self.operations if one.kind in kinds and one.may_have_happened]


def read_history(folder: Path) -> History:
    """Read the history of a run from the folder of the run.

    Of a run that is still going, operations that begin after this call are left out, whichever file has them already:
    what they need may be in a file that was read before.

    Raises:
        DataError: there is none, or a file of it is damaged.
    """
    boot, clock_now, unix_now = read_boot(), time.monotonic(), time.time()
    files = sorted((folder / FOLDER).glob("*.jsonl"))
    if not files:
        raise DataError(
            f"{folder} has no recorded history: start the run with run.record_history=true; services that run"
            " elsewhere write to their own run.dir, whose files belong into one folder"
        )
    history = History([])
    reference: dict[str, float] = {}
    for file in files:
        rows = list(_read_rows(file))
        if not rows:
            continue  # its process died before the first line was complete
        history.processes += 1
        head = rows[0]
        # The first file of a boot says what its clock shows at which time of day: one process may have started just
        # as the time of day was set.
        offset = reference.setdefault(head["boot"], head["unix"] - head["clock"])
        now = clock_now if head["boot"] == boot else unix_now - offset
        operations, gaps = _build_operations(file.stem, head["boot"], offset, rows[1:], now)
        history.operations += operations
        history.gaps += [f"{file.name}: {gap}" for gap in gaps]
    history.operations.sort(key=lambda one: (one.began, one.number))
    return history


def _read_rows(file: Path) -> Iterator[dict[str, Any]]:
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line end is incomplete
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or (number == 1) != ("boot" in row):
                raise ValueError("not a line of a history")
        except ValueError as error:
            raise DataError(f"{file} is damaged in line {number} ({error}): the history proves nothing") from None
        yield row


def _build_operations(
    process: str, clock: str, offset: float, rows: list[dict[str, Any]], now: float
) -> tuple[list[Operation], list[str]]:
    """Join the lines of each operation; report numbers that are missing or twice, and times that go back."""
    begun: dict[int, dict[str, Any]] = {}
    gaps: list[str] = []
    last, latest = 0, -math.inf
    for row in rows:
        number = row["n"]
        if "op" in row:
            if number != last + 1:
                gaps.append(f"operation {last + 1} is missing, or {number} is there twice")
            last = number
            begun[number] = row
        elif number in begun and "end" not in begun[number]:
            begun[number] |= row
        else:
            gaps.append(f"operation {number} ends without having begun, or twice")
        # A line that has both was written at the end.
        written = row["end"] if "end" in row else row["at"]
        if written < latest:
            gaps.append(f"operation {number} was written before the line above it")
        latest = max(latest, written)
    operations = []
    for number, row in begun.items():
        kind, began, ended, text = row["op"], row["at"], row.get("end", math.inf), row.get("result", UNKNOWN)
        if began > now:
            continue
        result = text if text in RESULTS else ERROR
        if ended > now:
            result = UNKNOWN
        if result not in (OK, REFUSED):
            ended = math.inf
        fields = {name: value for name, value in row.items() if name not in ("n", "op", "at", "end", "result")}
        error = text if result == ERROR else ""
        times = began + offset, ended + offset
        operations.append(Operation(kind, process, number, clock, *times, result, fields, error))
    return operations, gaps
