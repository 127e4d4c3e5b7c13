"""Verification of a run by its history: nothing lost, nothing twice, no late trainer, no token of an unknown policy.

What the run says about itself, its ledger and its checkpoints, is not read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from forage_queue.checker.operations import RESULTS, History, read_history
from forage_queue.checker.recorded_run import Limits, RecordedRun
from forage_queue.checker.rules import RULES, Violation


@dataclass(frozen=True)
class Report:
    """The result of a check. outstanding: batch → positions that were issued and are not acknowledged."""

    history: History
    violations: tuple[Violation, ...]
    steps: int
    total_steps: int | None
    outstanding: dict[int, list[int]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every step of the run is acknowledged."""
        return self.total_steps is not None and self.steps >= self.total_steps and not self.outstanding

    def count_by_kind(self) -> dict[str, Counter[str]]:
        """Count operations: kind → result → number."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for one in self.history.operations:
            counts[one.kind][one.result] += 1
        return dict(sorted(counts.items()))

    def to_json(self) -> dict[str, Any]:
        results = Counter(one.result for one in self.history.operations)
        rules = Counter(one.rule for one in self.violations)
        return {
            "processes": self.history.processes,
            "operations": len(self.history.operations),
            **{name: results[name] for name in RESULTS},
            "steps": self.steps,
            "total_steps": self.total_steps,
            "complete": self.is_complete,
            "outstanding": sum(map(len, self.outstanding.values())),
            "violations": len(self.violations),
            "rules": dict(sorted(rules.items())),
        }


def check(folder: Path) -> Report:
    """Verify the history of the run in a folder.

    Raises:
        DataError: there is no history, or a file of it is damaged.
    """
    return check_operations(read_history(folder), read_limits(folder))


def check_operations(history: History, limits: Limits) -> Report:
    """Verify operations by every rule."""
    run = RecordedRun(history, limits)
    violations = [Violation("gap", gap, ()) for gap in history.gaps]
    for rule in RULES:
        violations += rule(run)
    return Report(history, tuple(violations), max(run.acknowledged, default=0), limits.total_steps, run.outstanding)


def read_limits(folder: Path) -> Limits:
    """Read what the settings that `forage` has written into the folder of the run say."""
    try:
        tree = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
        trainer = tree["trainer"]
        return Limits(
            tree["data"]["train_batch_size"],
            trainer["total_training_steps"],
            trainer["max_staleness"],
            trainer.get("batching", "strict"),
        )
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        return Limits()
