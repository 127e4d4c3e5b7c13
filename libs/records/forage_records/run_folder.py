"""Reading a run's folder: steps, progress, validations, trajectories."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from forage_records.events import Event, read_events
from forage_records.json_text import parse_json
from forage_runtime.errors import DataError

Row = dict[str, Any]
STATE, DONE = "state.json", "done"
"""The file with the trainer's phase, and the last phase."""
WATCH = "watch-"
"""What the labels of watched questions begin with; the rest is the policy version."""
_VALIDATION_S = 40.0


@dataclass(frozen=True)
class Progress:
    """The trainer's current phase and its progress in it."""

    phase: str = "starting"
    detail: str = ""
    done: int = 0
    total: int = 0


class RunFolder:
    """Read access to `runs/<id>`; missing files read as empty."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._seen: dict[Path, tuple[tuple[int, int], list[Row]]] = {}

    @classmethod
    def open(cls, folder: Path) -> RunFolder:
        """Open an existing run.

        Raises:
            DataError: the folder is no run.
        """
        if not (folder / "settings.yaml").is_file():
            raise DataError(f"{folder} is not a run (it has no settings.yaml): start one with 'forage demo'")
        return cls(folder)

    def read_steps(self) -> list[Row]:
        """Read one row of metrics per optimizer step."""
        return self._rows(self.path / "metrics.jsonl")

    def read_progress(self) -> Progress:
        row = _read_object(self.path / STATE) or {}
        return Progress(**{field.name: row[field.name] for field in fields(Progress) if field.name in row})

    def read_validation(self, label: str) -> Row | None:
        """Read the metrics of a validation ("before", "after"); None before it has ended."""
        return _read_object(self.path / "validation" / f"{label}.json")

    def list_validations(self) -> list[str]:
        """List the labels of finished validations in the order of their steps, those of watched questions last."""
        labels = (file.stem for file in (self.path / "validation").glob("*.jsonl"))
        return sorted(labels, key=_order_label)

    def read_greedy_scores(self) -> list[tuple[int, float]]:
        """Read (policy version, exact match) of the validations of held-out questions; unknown ones are left out."""
        found: dict[int, float] = {}
        for label in self.list_validations():
            result = self.read_validation(label) or {}
            if not label.startswith(WATCH) and result.get("em") is not None and result.get("version") is not None:
                found[int(result["version"])] = float(result["em"])
        return sorted(found.items())

    def read_events(self) -> list[Event]:
        """Read what happened besides the steps; empty in runs of before."""
        return read_events(self.path)

    def read_trajectories(self, label: str) -> list[Row]:
        """Read every trajectory of a validation."""
        return self._rows(self.path / "validation" / f"{label}.jsonl")

    def find_model(self) -> Path:
        """Return the folder of the initial policy; this run's own where the settings name none."""
        try:
            tree = yaml.safe_load((self.path / "settings.yaml").read_bytes())
            return Path(tree["model"]["path"])
        except (OSError, yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return self.path

    def _rows(self, file: Path) -> list[Row]:
        """Read the file's rows; cached until the file changes, because the live view reads twice a second."""
        try:
            state = file.stat()
        except FileNotFoundError:
            return []
        if not stat.S_ISREG(state.st_mode):
            return []  # reading a pipe would wait for ever
        version = (state.st_mtime_ns, state.st_size)
        if self._seen.get(file, (None,))[0] != version:
            self._seen[file] = (version, _read_rows(file))
        return self._seen[file][1]


def _order_label(label: str) -> tuple[int, int, str]:
    kind = {"before": 0, "step": 1, "after": 2, "watch": 3}.get(label.partition("-")[0], 4)
    number = label.rpartition("-")[2]
    return kind, int(number) if number.isdecimal() else 0, label


def estimate_time_left(steps: Sequence[Row], total: int, phase: str) -> float | None:
    """Estimate the seconds until the run ends from the pace of the last 20 steps; None before the third step."""
    if len(steps) < 3:
        return None
    recent = steps[-20:]
    pace = (float(recent[-1]["time"]) - float(recent[0]["time"])) / (len(recent) - 1)
    left = (total - int(steps[-1]["step"])) * pace
    return left + (_VALIDATION_S if phase != DONE else 0)


def _read_rows(file: Path) -> list[Row]:
    rows = []
    for line in filter(None, file.read_bytes().split(b"\n")):
        try:
            row = parse_json(line)
        except (ValueError, RecursionError):
            break  # this line is still being written
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _read_object(file: Path) -> Row | None:
    try:
        value = parse_json(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
