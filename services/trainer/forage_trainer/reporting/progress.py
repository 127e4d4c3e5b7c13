"""What a live view reads: `<run folder>/state.json` (the phase) and `metrics.jsonl` (one line a step)."""

from __future__ import annotations

import json
import math
import os
from enum import StrEnum
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from forage_common.files import durable
from forage_trainer.files import write_json, write_text

PHASE = Gauge(
    "forage_trainer_phase", "1 for what the trainer is doing: starting, validating, training, done", ["phase"]
)


class Phase(StrEnum):
    STARTING = "starting"
    VALIDATING = "validating"
    TRAINING = "training"
    DONE = "done"


class StateFile:
    """The current phase; written when it changes, always a complete document."""

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
            self._last = state
            for each in Phase:
                PHASE.labels(each.value).set(each is phase)
            write_json(self._path, state)


class MetricsFile:
    """Appends one JSON line a step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"

    def rewind(self, step: int) -> None:
        """Drop lines of later steps (they will be taken again), and a line that was cut short."""
        if self._path.exists():
            kept = [line for line in self._path.read_text().splitlines() if _step_of(line) <= step]
            write_text(self._path, "".join(line + "\n" for line in kept))

    def ensure(self, metrics: dict[str, Any]) -> None:
        """Append a line unless the last one is of that step."""
        last = self._path.read_text().splitlines()[-1:] if self._path.exists() else []
        if not last or _step_of(last[0]) != metrics["step"]:
            self.append(metrics)

    def amend(self, step: int, metrics: dict[str, Any]) -> None:
        """Add figures to a step's line; nothing happens where it has none."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        found = [place for place, line in enumerate(lines) if _step_of(line) == step]
        if found:
            lines[found[-1]] = json.dumps(json.loads(lines[found[-1]]) | finite(metrics))
            write_text(self._path, "".join(line + "\n" for line in lines))

    def append(self, metrics: dict[str, Any]) -> None:
        """Numbers that are not finite are written as null."""
        plain = finite(metrics)
        new = not self._path.exists()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            durable.sync(self._path.parent)


def finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics with null for numbers that JSON cannot hold."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
