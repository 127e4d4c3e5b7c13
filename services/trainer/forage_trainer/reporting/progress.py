"""The files that a live view reads: `<run folder>/state.json` (the phase), `metrics.jsonl` (a line for each step)."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from forage_runtime.errors import DiskFullError
from forage_runtime.files import durable
from forage_runtime.files.folders import write_json, write_text
from forage_runtime.telemetry.logs import get_logger

PHASE = Gauge("forage_trainer_phase", "1 for the current phase: starting, validating, training, done", ["phase"])


class Phase(StrEnum):
    STARTING = "starting"
    VALIDATING = "validating"
    TRAINING = "training"
    DONE = "done"


class StateFile:
    """The file of the current phase; written atomically, when the phase changes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "state.json"
        self._last: dict[str, Any] | None = None

    def set(self, phase: Phase, detail: str, done: int = 0, total: int = 0) -> None:
        """
        Args:
            done, total: progress within the phase: trajectories of a validation, or training steps.
        """
        state = {"phase": phase.value, "detail": detail, "done": done, "total": total}
        if state != self._last:
            for each in Phase:
                PHASE.labels(each.value).set(each is phase)
            try:
                write_json(self._path, state)
            except DiskFullError as error:  # a view does not hold up the run
                get_logger().warning("state_not_written", reason=str(error))
            else:
                self._last = state


class MetricsFile:
    """The file of metrics, one JSON line for each step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"

    def rewind(self, step: int) -> None:
        """Delete the lines of later steps, which will be taken again, and a truncated line."""
        if self._path.exists():
            kept = [line for line in self._read_lines() if _parse_step(line) <= step]
            write_text(self._path, "".join(line + "\n" for line in kept))

    def append_missing(self, metrics: dict[str, Any]) -> None:
        """Append a line unless the last one is of the same step."""
        last = self._read_lines()[-1:]
        if not last or _parse_step(last[0]) != metrics["step"]:
            self.append(metrics)

    def amend(self, step: int, metrics: dict[str, Any]) -> None:
        """Add metrics to a step's line; a step without a line is left out."""
        lines = self._read_lines()
        matches = [number for number, line in enumerate(lines) if _parse_step(line) == step]
        if matches:
            lines[matches[-1]] = json.dumps(json.loads(lines[matches[-1]]) | replace_non_finite(metrics))
            write_text(self._path, "".join(line + "\n" for line in lines))

    def append(self, metrics: dict[str, Any]) -> None:
        """Append a line; numbers that are not finite are written as null."""
        durable.append(self._path, (json.dumps(replace_non_finite(metrics)) + "\n").encode())

    def _read_lines(self) -> list[str]:
        content = self._path.read_bytes().decode() if self._path.exists() else ""
        return content.removesuffix("\n").split("\n") if content else []


def replace_non_finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON has no form for (NaN, infinity) by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}


def _parse_step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
