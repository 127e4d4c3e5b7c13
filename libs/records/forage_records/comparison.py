"""Whether two runs are the same to the bit: the digests of trained tokens and of weights, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forage_records.run_folder import Row, RunFolder
from forage_runtime.errors import DataError

DIGESTS = ("tokens_digest", "weights_digest")


@dataclass(frozen=True)
class StepPair:
    """One step of both runs: their rows of metrics, None where a run did not take it."""

    step: int
    first: Row | None
    second: Row | None

    def is_equal(self, digest: str) -> bool:
        """Whether both runs took the step and have the same digest."""
        if self.first is None or self.second is None:
            return False
        return bool(self.first.get(digest) == self.second.get(digest))

    def show(self, digest: str) -> tuple[str, str]:
        """The beginnings of both digests; "–" where there is none, as for a step that a rollback skips."""
        first, second = (str((row or {}).get(digest) or "–")[:12] for row in (self.first, self.second))
        return first, second


@dataclass(frozen=True)
class RunComparison:
    """The steps of two runs, in order."""

    pairs: tuple[StepPair, ...]

    @property
    def first_difference(self) -> int | None:
        """The first step whose tokens or weights differ, or that one run lacks."""
        return next((pair.step for pair in self.pairs if not all(map(pair.is_equal, DIGESTS))), None)

    def to_json(self) -> dict[str, Any]:
        equal = {f"{name}s_equal": sum(pair.is_equal(name) for pair in self.pairs) for name in DIGESTS}
        return {"steps": len(self.pairs), **equal, "first_difference": self.first_difference}


def compare_runs(first: RunFolder, second: RunFolder) -> RunComparison:
    """Compare two runs.

    Raises:
        DataError: a run has no steps, or none with digests.
    """
    rows = []
    for run in (first, second):
        steps = {int(row["step"]): row for row in run.read_steps()}
        if not any(name in row for row in steps.values() for name in DIGESTS):
            raise DataError(
                f"{run.path} has no step with digests in metrics.jsonl: was it trained by an older version?"
            )
        rows.append(steps)
    return compare_steps(*rows)


def compare_steps(first: Mapping[int, Row], second: Mapping[int, Row]) -> RunComparison:
    """Compare the digests of two runs' steps: number of the step → its row."""
    return RunComparison(
        tuple(StepPair(step, first.get(step), second.get(step)) for step in sorted(first.keys() | second.keys()))
    )
