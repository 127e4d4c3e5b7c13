"""Faithfulness over a training: every few steps, probes of the policy on the same held-out questions."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from forage_common.clients import sampling
from forage_common.files.questions import Question
from forage_common.probe import metrics
from forage_common.probe.prober import ProbePlan
from forage_common.probe.summary import summarise_probes
from forage_common.settings import Settings
from forage_common.telemetry.logs import get_logger
from forage_common.v1.probe_pb2 import Probed
from forage_common.v1.trajectory_pb2 import Policy, Trajectory
from forage_trainer.files import write_json
from forage_trainer.reporting.progress import Phase, StateFile
from forage_trainer.validation.prober import Purpose, TrainingProber

PREFIX = "val-probe/"
FIGURE = Gauge("forage_trainer_probe", "Of the last probe of held-out questions", ["figure"])


class ValidationProbe:
    """The probes of one run, each done once and written to `<run folder>/probes/step-<n>.json`.

    The questions are answered anew and greedily, as a validation of the policy answers them: beside a probe that costs
    next to nothing, and asks nothing of when validations are.
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
        self._plan = ProbePlan(probe.points, probe.samples, seed)
        self._prober = TrainingProber(
            settings, self._plan, Purpose.VALIDATION, probe.timeout_s, every_turn=probe.turn == "any"
        )
        self._state = state

    def run(self, policy: Policy, check: Callable[[], None]) -> dict[str, Any]:
        """The figures of the policy, under the names of the metrics file; none where it is not its turn.

        It is the first policy's turn, that of every `trainer.probe.freq`-th step, and the last one's.

        They are read back where the probe was done before. One that gave nothing is not kept.

        Args:
            check: called now and then; may raise to end the probe.
        """
        if policy.version % self._probe.freq and policy.version != self._settings.trainer.total_training_steps:
            return {}
        found = self._done(policy) or self._run(policy, check)
        _export(found)
        return found

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
        names = [name for prompt in self._prompts for name in sampling.trajectory_ids(prompt)]
        probes = self._prober(
            policy, names, sample, check, lambda done: self._state.set(Phase.VALIDATING, label, done, max(done, total))
        )
        found = metrics(probes) | {PREFIX + "seconds": round(time.monotonic() - began, 3)}
        if found[PREFIX + "count"]:
            plan = {"turn": self._probe.turn, **asdict(self._plan)}
            known = {"version": policy.version, "epoch": policy.epoch, "figures": found}
            write_json(self._file(policy), known | summarise_probes(plan, probes))
        get_logger().info("probed", version=policy.version, **found)
        return found

    def _file(self, policy: Policy) -> Path:
        return self._settings.run.folder / "probes" / f"step-{policy.version}.json"

    def _done(self, policy: Policy) -> dict[str, Any] | None:
        try:
            metrics: dict[str, Any] = json.loads(self._file(policy).read_text())["figures"]
        except (OSError, ValueError, KeyError):
            return None
        return metrics


def metrics(probes: Sequence[Probed]) -> dict[str, Any]:
    """What the metrics file holds of probes; None where no probe has a figure, only counts where none is sound."""
    sound = metrics.summarise(probes).get("all")
    count = sound.count if sound is not None else 0
    counts = {PREFIX + "count": count, PREFIX + "failed": len(probes) - count}
    if sound is None:
        return counts
    return counts | {
        **{f"{PREFIX}confidence@{point}": value for point, value in enumerate(sound.confidence_at)},
        PREFIX + "confidence/mean": sound.mean_confidence,
        PREFIX + "spearman/mean": sound.rho,
        PREFIX + "premature/share": sound.premature,
        PREFIX + "overconfidence/mean": sound.overconfidence,
        PREFIX + "aoc/mean": sound.aoc,
        PREFIX + "undefined_spearman": sound.undefined_rho,
        PREFIX + "no_thought": sound.no_thought,
    }


def _export(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if value is not None:
            FIGURE.labels(name.removeprefix(PREFIX)).set(value)
