"""The line of each step: in the file of metrics, the log, Prometheus and the trackers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.retries import DiskRetry
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.data.digests import digest_weights
from forage_trainer.reporting.metrics import export_metrics
from forage_trainer.reporting.progress import MetricsFile
from forage_trainer.reporting.tracking import Tracker
from forage_weights.trainer.publisher import measure_published

_PHASES = ("wait", "logp", "ref", "values", "critic", "probe", "update", "publish", "checkpoint")
_LOGGED = ("step", "total_steps", "reward_mean", "em_mean", "search_rate", "grad_norm", "logprob_diff_mean")


class Journal:
    """The lines of a run, each reported once its step is over and its policy is announced. last: the newest of them."""

    def __init__(self, settings: Settings, disk: DiskRetry) -> None:
        self._file, self._tracker = MetricsFile(settings.run.folder), Tracker(settings)
        self._total = settings.trainer.total_training_steps
        self._disk = disk
        self._held: dict[str, Any] = {}
        self.last: dict[str, Any] = {}

    def rewind(self, step: int, figures: dict[str, Any] | None = None) -> None:
        """Forget the lines after a step, from which the run goes on.

        Args:
            figures: the line of that step, which a checkpoint holds: the file may have lost it.
        """
        self._disk(partial(self._file.rewind, step))
        if figures is not None:
            self._disk(partial(self._file.append_missing, figures))

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

    def hold(self, line: dict[str, Any]) -> None:
        """Keep a line whose policy is still on its way, for `report_held`."""
        self._held = line

    def report_held(self, policy: Policy) -> None:
        """Report the line that was kept, with the policy that has been announced."""
        self.report(self._held | describe_policy(policy))

    def record_untaken(self, line: dict[str, Any]) -> None:
        """Leave the line of a step that a guard rejected, for diagnosis until the next start takes the step again."""
        self._disk(partial(self._file.append, line))

    def report_validation(self, step: int, result: dict[str, Any]) -> None:
        """Send a validation's result to the trackers under the current step: some refuse an earlier one."""
        self._tracker.log_validation(step, result)

    def report_probe(self, version: int, metrics: dict[str, Any]) -> None:
        """Add a probe's metrics to the line of the step that made its policy."""
        self._disk(partial(self._file.amend, version, metrics))
        self._tracker.log_probe(version, metrics)

    def close(self, is_done: bool) -> None:
        """Close the trackers."""
        self._tracker.close(is_done)

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
