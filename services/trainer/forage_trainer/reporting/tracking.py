"""Metrics and validation answers for experiment trackers, through verl's Tracking, under verl's names.

A tracker that fails loses metrics and never ends the run. `metrics.jsonl` and Prometheus are independent of it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from forage_records.run_folder import RunFolder
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.redaction import redact_settings, redact_text
from forage_trainer.reporting.metrics import VERL_NAMES

FAILED = Counter("forage_trainer_tracking_failures_total", "Steps whose metrics a tracker did not accept", ["backend"])

PHASES = {
    "logp": "old_log_prob",
    "critic": "update_critic",
    "update": "update_actor",
    "publish": "update_weights",
    "checkpoint": "save_checkpoint",
    "total": "step",
}
"""Our name of a phase → verl's, after `timing_s/`, where they differ."""

_OWN = "forage/"
_VERLS = set(VERL_NAMES.values())
_RENAMED = {"tokens": "perf/total_num_tokens", "step": "training/global_step"}


def to_tracker_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Convert the numbers of a step's line: under verl's names where it has one, else below `forage/`."""
    metrics: dict[str, float] = {}
    for name, value in line.items():
        if name == "seconds":
            metrics |= {f"timing_s/{PHASES.get(phase, phase)}": seconds for phase, seconds in value.items()}
        elif isinstance(value, bool) or not isinstance(value, int | float) or name in _VERLS or name == "time":
            continue
        else:
            metrics[_RENAMED.get(name) or (name if "/" in name else _OWN + name)] = value
    return metrics


def to_validation_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Convert the numbers of a validation: exact match by data source under verl's name, the rest below `forage/`."""
    metrics: dict[str, float] = {}
    for name, value in result.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        source = name.removeprefix("em/")
        metrics[f"val-core/{source}/em/mean@1" if source != name else f"{_OWN}validation/{name}"] = value
    return metrics


def to_table(records: Sequence[Mapping[str, Any]], count: int) -> list[tuple[str, str, float | None]]:
    """Choose answers of a validation, evenly over its questions and so the same ones each time.

    Args:
        count: how many; all where there are fewer.

    Returns:
        (question with its accepted answers, what the policy and its environment wrote, exact match) of each.
    """
    count = min(count, len(records))
    return [
        (
            f"{record['question']}\n\naccepted: {'; '.join(record['targets'])}",
            "".join(span["text"] for span in record["spans"] if span["role"] != "prompt"),
            record["em"],
        )
        for record in (records[place * len(records) // count] for place in range(count))
    ]


class Tracker:
    """Sends the metrics of every step to the backends of `trainer.logger`."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            UserError: a backend does not start.
        """
        self._backends = tuple(dict.fromkeys(settings.trainer.logger))
        self._tracking: Any = None
        self._last_step_file = settings.run.folder / "tracked"
        self._folder, self._shown = settings.run.folder, settings.trainer.log_val_generations
        if not self._backends:
            return
        folder = settings.run.folder
        # Defaults where the user's environment has none: files lie in the run's folder, MLflow's database beside it.
        os.environ.setdefault("TENSORBOARD_DIR", str(folder / "tensorboard"))
        os.environ.setdefault("WANDB_DIR", str(folder))
        runs = settings.run.dir.absolute()
        own_mlflow = "mlflow" in self._backends and "MLFLOW_TRACKING_URI" not in os.environ
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{runs / 'mlflow.db'}")
        os.environ.setdefault("TRACKIO_DIR", str(runs / "trackio"))
        os.environ.setdefault("SWANLAB_LOG_DIR", str(runs / "swanlab"))
        from verl.utils.tracking import Tracking, ValidationGenerationsLogger

        names = [backend for backend in self._backends]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with redirect_stdout(sys.stderr):
                if own_mlflow:
                    _create_experiment(settings.trainer.project_name, runs / "mlflow")
                self._tracking = Tracking(
                    settings.trainer.project_name,
                    settings.run.id,
                    names,
                    redact_settings(settings.model_dump(mode="json", exclude={"redis"})),
                )
        except Exception as error:  # whatever a tracker's own library raises
            raise UserError(f"trainer.logger {names}: a tracker does not start ({_format_error(error)})") from error
        self._answers = ValidationGenerationsLogger(settings.trainer.project_name, settings.run.id)
        silent = [name for name in names if name not in self._tracking.logger]
        if silent:
            raise UserError(
                f"trainer.logger: {silent[0]} does not start, see the log: check its address and credentials"
            )

    def log_step(self, step: int, line: Mapping[str, Any]) -> None:
        """Send a step's metrics, unless the run sent that step before a restart: trackers would show it twice."""
        if self._backends and step > self._read_last_step():
            self._send(step, to_tracker_metrics(line))
            self._last_step_file.write_text(f"{step}\n", encoding="utf-8")

    def _read_last_step(self) -> int:
        try:
            return int(self._last_step_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0

    def log_validation(self, step: int, result: Mapping[str, Any]) -> None:
        """Send the result of a validation that ended after `step` steps, and a table of some of its answers."""
        self._send(step, to_validation_metrics(result))
        if self._backends and self._shown:
            # A reader of its own: one that is kept would hold every validation in memory.
            rows = functools.cache(lambda: RunFolder(self._folder).read_trajectories(result["label"]))
            self._try_each(step, lambda backend: self._answers.log([backend], to_table(rows(), self._shown), step))

    def log_probe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a probe of the policy after `step` steps."""
        self._send(step, to_tracker_metrics(metrics))

    def close(self, done: bool) -> None:
        """Flush the trackers.

        Args:
            done: the run took all its steps.
        """
        if self._tracking is None:
            return
        try:
            self._tracking.finish(0 if done else 1)
        except Exception as error:  # noqa: BLE001 - a tracker that cannot be closed must not change how the run ends
            get_logger().warning("tracking_not_closed", reason=_format_error(error))

    def _send(self, step: int, metrics: dict[str, float]) -> None:
        self._try_each(step, lambda backend: self._tracking.log(metrics, step, [backend]))

    def _try_each(self, step: int, send: Callable[[str], object]) -> None:
        for backend in self._backends:
            try:
                send(backend)
            except Exception as error:  # noqa: BLE001 - a tracker that is out of reach must not end the run
                FAILED.labels(backend).inc()
                get_logger().warning("tracking_failed", backend=backend, step=step, reason=_format_error(error))


def _create_experiment(name: str, artifacts: Path) -> None:
    """Create an experiment in MLflow's database, whose files would otherwise be in the working directory."""
    import mlflow

    if mlflow.get_experiment_by_name(name) is not None:
        return
    try:
        mlflow.create_experiment(name, artifact_location=artifacts.as_uri())
    except mlflow.MlflowException:  # another run that starts at the same time may have created it
        if mlflow.get_experiment_by_name(name) is None:
            raise


def require_backend(backend: str) -> None:
    """
    Raises:
        UserError: the backend's package is not installed; the message has the command.
    """
    if importlib.util.find_spec(backend) is None:
        raise UserError(
            f"trainer.logger names {backend}, which is not installed: "
            f"run '.venvs/uv/bin/uv pip install --python {sys.prefix} --no-deps -r services/trainer/trackers.lock', or "
            "leave it out"
        )


def _format_error(error: Exception) -> str:
    return redact_text(" ".join(str(error).split()))[:200] or type(error).__name__
