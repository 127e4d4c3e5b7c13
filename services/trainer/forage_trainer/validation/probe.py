"""Faithfulness during training: every few steps, a probe of the policy on the same held-out questions."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from forage_probe import metrics as probe_metrics
from forage_probe.metrics import summarise_probes
from forage_proto.v1.probe_pb2 import Probed
from forage_proto.v1.trajectory_pb2 import Policy, Trajectory
from forage_records import sampling
from forage_records.questions import Question
from forage_runtime.files.folders import write_json
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.reporting.progress import Phase, StateFile
from forage_trainer.validation.prober import Purpose, TrainingProber

PREFIX = "val-probe/"
PROBE = Gauge("forage_trainer_probe", "Metrics of the last probe of held-out questions", ["metric"])


class ValidationProbe:
    """The probes of one run, each done once and written to `<run folder>/probes/step-<n>.json`.

    The questions are answered again, greedily, as in a validation. That costs little beside the probe itself, and
    makes the schedules of probes and validations independent.
    """

    def __init__(self, settings: Settings, questions: Sequence[Question], state: StateFile) -> None:
        """
        Args:
            settings: with a trainer.probe.freq above 0.
            questions: of the validation.

        Raises:
            SettingsError: as `TrainingProber`.
        """
        self._settings = settings
        self._probe = probe = settings.trainer.probe
        seed = settings.run.seed
        chosen = random.Random(seed).sample(list(questions), min(probe.trajectories, len(questions)))
        self._prompts = sampling.build_prompts(chosen, settings, 1, greedy=True, seed=seed)
        self._prober = TrainingProber(settings, Purpose.VALIDATION)
        self._state = state

    def run(self, policy: Policy, check: Callable[[], None]) -> dict[str, Any]:
        """Probe the policy; returns its metrics under the names of the metrics file, none if it is not scheduled.

        Scheduled are the first policy, that of every `trainer.probe.freq`-th step, and the last one. The result of a
        probe before a restart is read from its file; a probe without any result has none.

        Args:
            check: called periodically; may raise to end the probe.
        """
        if policy.version % self._probe.freq and policy.version != self._settings.trainer.total_training_steps:
            return {}
        metrics = self._read_metrics(policy) or self._run(policy, check)
        for name, value in metrics.items():
            if value is not None:
                PROBE.labels(name.removeprefix(PREFIX)).set(value)
        return metrics

    def _run(self, policy: Policy, check: Callable[[], None]) -> dict[str, Any]:
        began = time.monotonic()
        label, total = f"probe of step {policy.version}", len(self._prompts)
        sampled: dict[str, Trajectory] = {}

        async def sample() -> list[Trajectory]:
            left = [prompt for prompt in self._prompts if not sampling.trajectory_ids(prompt) <= sampled.keys()]
            async with aclosing(sampling.sample_groups(left, self._settings)) as answered:
                async for group in answered:
                    sampled.update({trajectory.id: trajectory for trajectory in group})
            return list(sampled.values())

        self._state.set(Phase.VALIDATING, label, 0, total)
        ids = [id for prompt in self._prompts for id in sampling.trajectory_ids(prompt)]
        probes = self._prober(
            policy, ids, sample, check, lambda done: self._state.set(Phase.VALIDATING, label, done, max(done, total))
        )
        metrics = to_metrics(probes) | {PREFIX + "seconds": round(time.monotonic() - began, 3)}
        if metrics[PREFIX + "count"]:
            plan = {"turn": "answer", **asdict(self._prober.plan)}
            header = {"version": policy.version, "epoch": policy.epoch, "figures": metrics}
            write_json(self._file(policy), header | summarise_probes(plan, probes))
        get_logger().info("probed", version=policy.version, **metrics)
        return metrics

    def _file(self, policy: Policy) -> Path:
        return self._settings.run.folder / "probes" / f"step-{policy.version}.json"

    def _read_metrics(self, policy: Policy) -> dict[str, Any] | None:
        try:
            metrics: dict[str, Any] = json.loads(self._file(policy).read_text(encoding="utf-8"))["figures"]
        except (OSError, ValueError, KeyError):
            return None
        return metrics


def to_metrics(probes: Sequence[Probed]) -> dict[str, Any]:
    """Summarize probes for the metrics file. A metric that no probe has is None; without a valid probe, only counts."""
    summary = probe_metrics.summarise(probes).get("all")
    count = summary.count if summary is not None else 0
    counts = {PREFIX + "count": count, PREFIX + "failed": len(probes) - count}
    if summary is None:
        return counts
    return counts | {
        **{f"{PREFIX}confidence@{point}": value for point, value in enumerate(summary.confidence_at)},
        PREFIX + "confidence/mean": summary.mean_confidence,
        PREFIX + "spearman/mean": summary.rho,
        PREFIX + "premature/share": summary.premature,
        PREFIX + "overconfidence/mean": summary.overconfidence,
        PREFIX + "aoc/mean": summary.aoc,
        PREFIX + "undefined_spearman": summary.undefined_rho,
        PREFIX + "no_thought": summary.no_thought,
    }
