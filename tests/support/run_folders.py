"""Run folders as a training leaves them: settings, validations with their trajectories, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forage_records.run_folder import RunFolder
from forage_runtime.settings import Settings

Row = Mapping[str, Any]


def write_run(folder: Path, validations: Mapping[str, Sequence[Row]], steps: Iterable[Row]) -> RunFolder:
    """A run that has ended. The first trajectory of a validation decides its exact match."""
    taken = list(steps)
    (folder / "settings.yaml").write_text(Settings().to_yaml())
    (folder / "validation").mkdir()
    for label, rows in validations.items():
        last = 0 if label == "before" else len(taken) if label == "after" else int("0" + label.rpartition("-")[2])
        summary = {"em": rows[0]["em"], "count": len(rows), "version": last}
        (folder / "validation" / f"{label}.json").write_text(json.dumps(summary))
        (folder / "validation" / f"{label}.jsonl").write_text(write_lines(rows))
    (folder / "metrics.jsonl").write_text(write_lines(taken))
    return RunFolder.open(folder)


def write_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
