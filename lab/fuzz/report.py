"""The progress of a run over all wires, and its table at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fuzz.play import MAY_GROW_BYTES

_INTERVAL_S = 5.0
_COLUMNS = ("wire", "inputs", "crashes", "5xx", "hangs", "rss growth", "inputs/s", "outcomes")


class Display:
    """Shows how far each wire is: one line that changes on a terminal, a line every few seconds elsewhere."""

    def __init__(self, wires: Sequence[str], total: int) -> None:
        self.rows: dict[str, dict[str, Any]] = {wire: {} for wire in wires}
        self._total = total
        self._lock = threading.Lock()
        self._began = self._shown = time.monotonic()

    def update(self, wire: str, row: dict[str, Any]) -> None:
        """Take the result of a wire so far."""
        with self._lock:
            self.rows[wire] = row
            is_terminal = sys.stderr.isatty()
            if time.monotonic() - self._shown > (0.5 if is_terminal else _INTERVAL_S):
                self._shown = time.monotonic()
                print(self._describe(), end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)

    def fail(self, wire: str, problem: str) -> None:
        """Note that the wire could not be fuzzed to its end."""
        with self._lock:
            self.rows[wire].setdefault("problems", []).append(f"the fuzzer itself failed: {problem[-3000:]}")
            self.rows[wire]["failed"] = True

    def close(self) -> None:
        """End the line on a terminal."""
        if sys.stderr.isatty():
            print(file=sys.stderr)

    def _describe(self) -> str:
        sent = sum(row.get("inputs", 0) for row in self.rows.values())
        seconds = time.monotonic() - self._began
        faults = sum(_count_faults(row) for row in self.rows.values())
        busy = [wire for wire, row in self.rows.items() if row and not row.get("outcomes")]
        return f"{seconds:5.0f} s  {sent}/{self._total} inputs  {faults} faults  now: {', '.join(busy)}\x1b[K"


def summarize(rows: Mapping[str, Mapping[str, Any]], seed: int) -> tuple[str, dict[str, Any]]:
    """The table, with a line for each problem below it, and the object of the last line."""
    lines = [_COLUMNS]
    for wire, row in rows.items():
        outcomes = ", ".join(f"{name} {count}" for name, count in list(row.get("outcomes", {}).items())[:6])
        speed = row.get("inputs", 0) / max(1e-9, row.get("seconds", 0.0))
        counts = [str(row.get(key, 0)) for key in ("inputs", "crashes", "errors", "hangs")]
        grown = f"{row.get('grown_bytes', 0) / 2**20:.0f} MiB"
        lines.append((wire, *counts, grown, f"{speed:.0f}", outcomes))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS) - 1)]
    table = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, (*widths, 0), strict=True)) for line in lines]
    for wire, row in rows.items():
        table += [f"problem of {wire}: {problem}" for problem in row.get("problems", ())]
        table += [f"saved: {file}  (make fuzz REPLAY={file})" for file in row.get("saved", ())]

    def add(key: str) -> int:
        return sum(int(row.get(key, 0)) for row in rows.values())

    grown = max((int(row.get("grown_bytes", 0)) for row in rows.values()), default=0)
    failed = [wire for wire, row in rows.items() if row.get("failed") or not row]
    faults = sum(_count_faults(row) for row in rows.values())
    return "\n".join(table), {
        "inputs": add("inputs"),
        "crashes": add("crashes"),
        "errors_5xx": add("errors"),
        "hangs": add("hangs"),
        "rss_growth": grown,
        "rss_growth_limit": MAY_GROW_BYTES,
        "wires": len(rows),
        "seed": seed,
        "failed": failed,
        "clean": not faults and not failed and grown <= MAY_GROW_BYTES,
    }


def _count_faults(row: Mapping[str, Any]) -> int:
    return sum(int(row.get(key, 0)) for key in ("crashes", "errors", "hangs"))
