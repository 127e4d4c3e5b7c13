"""The runs of a folder: which there are, how far each came, and in what two of them differ."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_records.run_folder import Row, RunFolder
from forage_records.run_settings import RunSettings, read_settings
from forage_runtime.errors import DataError, UserError

LATEST = "latest"
"""Link in the folder of all runs to the one that was started last."""
_STEP_METRICS = ("reward_mean", "em_mean", "search_rate", "format_rate", "kl_ref", "staleness_mean", "tokens_per_s")
_SUMMARY_METRICS = ("minutes", "groups_issued", "groups_trained", "groups_lost", "groups_duplicated", "restarts")


@dataclass(frozen=True)
class RunState:
    """How far a run came.

    Attributes:
        steps: optimizer steps that it has reported.
        total_steps: those that it is to take; None where its settings do not say.
        phase: what its trainer did last, such as "training" or "done".
        em_before, em_after: greedy exact match before and after training; None before that is known.
        changed: time of its last report, seconds since 1970.
    """

    id: str
    folder: Path
    steps: int
    total_steps: int | None
    phase: str
    em_before: float | None
    em_after: float | None
    changed: float

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "folder": str(self.folder)}


def list_folders(runs: Path) -> list[Path]:
    """List the folders of runs, the one that was started first at the beginning; empty where there is no folder."""
    files = [file for file in runs.glob("*/settings.yaml") if file.is_file()]
    found = [file.parent for file in files if not file.parent.is_symlink()]
    return sorted(found, key=lambda folder: ((folder / "settings.yaml").stat().st_mtime, folder.name))


def find_run(runs: Path, name: str) -> RunFolder:
    """Find a run by its id, by `latest`, or by its folder.

    Raises:
        DataError: there is no such run; the message lists those that there are.
    """
    for folder in (runs / name, Path(name)):
        if name and (folder / "settings.yaml").is_file():
            return RunFolder(folder.resolve())
    ids = [folder.name for folder in list_folders(runs)]
    known = f"it has {', '.join(ids[-5:])}{' and others' if len(ids) > 5 else ''}" if ids else "it has none"
    raise DataError(f"there is no run '{name}' in {runs}: {known}; --runs names another folder")


def find_own_run(runs: Path, name: str) -> RunFolder:
    """Find a run as `find_run` does, which may be removed: a folder of its own, directly in the folder of runs.

    Raises:
        DataError: there is no such run.
        UserError: it lies elsewhere, or is a link that leads elsewhere.
    """
    run = find_run(runs, name)
    if run.path.parent != runs.resolve():
        raise UserError(f"'{name}' is {run.path}, which is not directly in {runs.resolve()}: remove it yourself")
    return run


def read_state(run: RunFolder) -> RunState:
    """Read how far a run came."""
    steps = run.read_steps()
    total = load_settings(run).flat.get("trainer.total_training_steps")
    before, after = (run.read_validation(label) or {} for label in ("before", "after"))
    files = (run.path / name for name in ("settings.yaml", "metrics.jsonl", "state.json", "summary.json"))
    return RunState(
        id=run.path.name,
        folder=run.path,
        steps=last if isinstance(last := steps[-1].get("step") if steps else 0, int) else len(steps),
        total_steps=total if isinstance(total, int) else None,
        phase=run.read_progress().phase if (run.path / "state.json").is_file() else "",
        em_before=before.get("em"),
        em_after=after.get("em"),
        changed=max(file.stat().st_mtime for file in files if file.is_file()),
    )


def load_settings(run: RunFolder) -> RunSettings:
    """Load the settings of a run, without credentials. Those of an older version stay readable.

    Raises:
        DataError: the file is damaged.
    """
    found = read_settings(run.path / "settings.yaml")
    if found.problem:
        raise DataError(f"{run.path / 'settings.yaml'} is damaged ({found.problem}): restore it, or remove the run")
    return found


def find_changed_settings(run: RunFolder) -> dict[str, Any]:
    """Find the settings of a run that are not the defaults of this version."""
    settings = load_settings(run)
    return {name: settings.flat[name] for name in settings.list_changed()}


def compare_settings(first: RunFolder, second: RunFolder) -> dict[str, tuple[Any, Any]]:
    """Compare the settings of two runs: name → both values, of those that differ; a missing one is None.

    Their own ids, and files in their own folders, are no difference.
    """
    compared = load_settings(first).compare(load_settings(second))
    pairs = {name: (_drop_folder(first, one), _drop_folder(second, other)) for name, one, other in compared}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def read_metrics(run: RunFolder) -> dict[str, float]:
    """Read the final metrics of a run: those of its last step, of its validations and of its summary."""
    steps, state = run.read_steps(), read_state(run)
    found: dict[str, Any] = {"steps": state.steps, "em_before": state.em_before, "em_after": state.em_after}
    found |= {f"last step: {name}": steps[-1].get(name) for name in _STEP_METRICS if steps}
    found |= {name: _read_summary(run).get(name) for name in _SUMMARY_METRICS}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _read_summary(run: RunFolder) -> Row:
    try:
        summary = json.loads((run.path / "summary.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _drop_folder(run: RunFolder, value: Any) -> Any:
    return value.replace(f"{run.path}/", "<run>/") if isinstance(value, str) else value
