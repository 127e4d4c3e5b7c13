"""Run folders as a training leaves them: settings, validations with their trajectories, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forage_cli.runs.folder import RunFolder
from forage_common.settings import Settings

Row = Mapping[str, Any]


def write_run(folder: Path, validations: Mapping[str, Sequence[Row]], steps: Iterable[Row]) -> RunFolder:
    """A run that has ended. The first trajectory of a validation decides its exact match."""
    (folder / "settings.yaml").write_text(Settings().to_yaml())
    (folder / "validation").mkdir()
    for label, rows in validations.items():
        summary = {"em": rows[0]["em"], "count": len(rows)}
        (folder / "validation" / f"{label}.json").write_text(json.dumps(summary))
        (folder / "validation" / f"{label}.jsonl").write_text(write_lines(rows))
    (folder / "metrics.jsonl").write_text(write_lines(steps))
    return RunFolder.open(folder)


def write_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
