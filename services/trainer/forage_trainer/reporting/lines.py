"""The line of each step: in the file of metrics, the log, Prometheus and the trackers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_trainer.data.digests import digest_weights
from forage_trainer.reporting.metrics import export_metrics
from forage_trainer.reporting.progress import MetricsFile
from forage_trainer.reporting.tracking import Tracker
from forage_trainer.waiting import DiskRetry
from forage_trainer.weights.publisher import measure_published

_PHASES = ("wait", "logp", "ref", "values", "critic", "probe", "update", "publish", "checkpoint")
_LOGGED = ("step", "total_steps", "reward_mean", "em_mean", "search_rate", "grad_norm", "logprob_diff_mean")


class StepLines:
    """Builds and reports the lines of a run. last: the one that was reported last."""

    def __init__(self, file: MetricsFile, tracker: Tracker, total: int, disk: DiskRetry) -> None:
        """
        Args:
            total: steps of the run.
        """
        self._file = file
        self._tracker = tracker
        self._total = total
        self._disk = disk
        self.last: dict[str, Any] = {}

    def build(
        self, step: int, metrics: Mapping[str, Any], phases: Mapping[str, float], total_s: float
    ) -> dict[str, Any]:
        """Build the line of a step.

        Args:
            phases: seconds of its phases; total_s: of the whole step.
        """
        every = dict.fromkeys(_PHASES, 0.0) | dict(phases) | {"total": total_s}
        seconds = {name: round(value, 4) for name, value in every.items()}
        rate = {"seconds": seconds, "tokens_per_s": metrics["tokens"] / total_s, "time": time.time()}
        return {"step": step, "total_steps": self._total, **metrics, **rate}

    def report(self, line: dict[str, Any]) -> None:
        """Report a step that is over."""
        self.last = line
        self._disk(partial(self._file.append, line))
        export_metrics(line)
        self._tracker.log_step(line["step"], line)
        get_logger().info("step_done", **{name: line.get(name) for name in _LOGGED}, seconds=line["seconds"]["total"])


def describe_policy(policy: Policy) -> dict[str, Any]:
    """What the line of a step says about the policy that it has made."""
    return {"publish_bytes": measure_published(policy), "weights_digest": digest_weights(policy)}
