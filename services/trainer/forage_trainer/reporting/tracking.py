"""Figures for TensorBoard, Weights & Biases and MLflow, through verl's Tracking, under verl's names.

What a tracker does wrong costs its figures, never the run. `metrics.jsonl` and Prometheus need none of them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from prometheus_client import Counter

from forage_common.errors import UserError
from forage_common.settings import LoggerBackend, Settings
from forage_common.telemetry.logs import get_logger
from forage_trainer.reporting.metrics import VERL_NAMES

FAILED = Counter("forage_trainer_tracking_failures_total", "Steps whose figures a tracker did not take", ["backend"])

PHASES = {
    "logp": "old_log_prob",
    "critic": "update_critic",
    "update": "update_actor",
    "publish": "update_weights",
    "checkpoint": "save_checkpoint",
    "total": "step",
}
"""Our phases → verl's name, after `timing_s/`; those that are called alike are left out."""

_OWN = "forage/"
_VERLS = set(VERL_NAMES.values())
_RENAMED = {"tokens": "perf/total_num_tokens", "step": "training/global_step"}
_SECRET: dict[str, Any] = {"redis": True, "trainer": {"upload_url"}}
"""Settings that may hold credentials: no tracker sees them."""


def tracked(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's line of metrics: under verl's names where it has one, else below `forage/`."""
    figures: dict[str, float] = {}
    for name, value in line.items():
        if name == "seconds":
            figures |= {f"timing_s/{PHASES.get(phase, phase)}": seconds for phase, seconds in value.items()}
        elif isinstance(value, bool) or not isinstance(value, int | float) or name in _VERLS or name == "time":
            continue
        else:
            figures[_RENAMED.get(name) or (name if "/" in name else _OWN + name)] = value
    return figures


def validated(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a validation: exact match of each data source under verl's name, the rest below `forage/`."""
    figures: dict[str, float] = {}
    for name, value in result.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        source = name.removeprefix("em/")
        figures[f"val-core/{source}/em/mean@1" if source != name else f"{_OWN}validation/{name}"] = value
    return figures


class Tracker:
    """The backends of `trainer.logger`, told every step."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            UserError: a backend is not installed, or does not start.
        """
        self._backends = tuple(dict.fromkeys(settings.trainer.logger))
        self._tracking: Any = None
        self._told = settings.run.folder / "tracked"
        if not self._backends:
            return
        for backend in self._backends:
            require(backend)
        folder = settings.run.folder
        # Where the user has said nothing, what trackers write lies with the run, and MLflow's runs side by side.
        os.environ.setdefault("TENSORBOARD_DIR", str(folder / "tensorboard"))
        os.environ.setdefault("WANDB_DIR", str(folder))
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{settings.run.dir.absolute() / 'mlflow.db'}")
        from verl.utils.tracking import Tracking

        names = [backend.value for backend in self._backends]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with redirect_stdout(sys.stderr):
                self._tracking = Tracking(
                    settings.trainer.project_name,
                    settings.run.id,
                    names,
                    settings.model_dump(mode="json", exclude=_SECRET),
                )
        except Exception as error:  # whatever a tracker's own library raises
            raise UserError(f"trainer.logger {names}: a tracker does not start ({_words(error)})") from error
        silent = [name for name in names if name not in self._tracking.logger]
        if silent:
            raise UserError(
                f"trainer.logger: {silent[0]} does not start, see the log: check its address and credentials"
            )

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        """Hand on a step's line of metrics, unless an earlier life of the run has handed on that step."""
        if self._backends and step > self._last():
            self._hand_on(step, tracked(line))
            self._told.write_text(f"{step}\n")

    def _last(self) -> int:
        try:
            return int(self._told.read_text())
        except (OSError, ValueError):
            return 0

    def validated(self, step: int, result: Mapping[str, Any]) -> None:
        """Hand on the result of a validation that is known after `step` steps."""
        self._hand_on(step, validated(result))

    def probed(self, step: int, figures: Mapping[str, float]) -> None:
        """Hand on the figures of a probe of the policy after `step` steps."""
        self._hand_on(step, tracked(figures))

    def close(self, done: bool) -> None:
        """Write out what is held back.

        Args:
            done: the run has ended as it should.
        """
        if self._tracking is None:
            return
        try:
            self._tracking.finish(0 if done else 1)
        except Exception as error:  # noqa: BLE001 - a tracker that cannot be closed must not change how the run ends
            get_logger().warning("tracking_not_closed", reason=_words(error))

    def _hand_on(self, step: int, figures: dict[str, float]) -> None:
        for backend in self._backends:
            try:
                self._tracking.log(figures, step, [backend.value])
            except Exception as error:  # noqa: BLE001 - a tracker that is out of reach must not end the run
                FAILED.labels(backend.value).inc()
                get_logger().warning("tracking_failed", backend=backend.value, step=step, reason=_words(error))


def require(backend: LoggerBackend) -> None:
    """
    Raises:
        UserError: the backend's package is not installed; says how to.
    """
    if importlib.util.find_spec(backend.value) is None:
        raise UserError(
            f"trainer.logger names {backend.value}, which is not installed: "
            f"run '.venvs/uv/bin/uv pip install --python {sys.prefix} {backend.value}', or leave it out"
        )


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
