"""Rollbacks of a run: `<run folder>/rollbacks.json`, which every later life of the trainer reads.

A rollback ends the process before the step's policy is published and before its groups are acknowledged. The next
life resumes from the newest checkpoint, is given the same groups, and takes the same steps again, except that the step
that set the guard off only consumes its groups: every group is still consumed once, and none is trained on twice.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from forage_common.errors import ForageError, UserError
from forage_trainer.files import write_json
from forage_trainer.reporting.guards import Trip

ROLLBACKS = Gauge("forage_trainer_rollbacks", "Rollbacks of this run, in all lives of its trainer")
ROLLED_BACK = Gauge("forage_trainer_last_rollback_timestamp_seconds", "Unix time of the last rollback; 0 = none")


class GuardStopError(UserError):
    """A guard ended the run; a start without other settings would meet the same."""


class RolledBackError(ForageError):
    """A guard sent the run back to its newest checkpoint; the next start goes on from there."""


class Rollbacks:
    """The rollbacks of one run."""

    def __init__(self, folder: Path, limit: int) -> None:
        """
        Args:
            folder: of the run.
            limit: of rollbacks; one more trip stops the run.

        Raises:
            UserError: the file is not readable.
        """
        self._path = folder / "rollbacks.json"
        self._limit = limit
        try:
            self._done: list[dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else []
            self._skipped = {int(one["step"]) for one in self._done}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._path} cannot be read ({error!r}): it lists steps to skip; mend or remove it"
            ) from None
        # A rollback ends the process before it is scraped: the next life tells of it.
        ROLLBACKS.set(len(self._done))
        ROLLED_BACK.set(max((float(one.get("time", 0.0)) for one in self._done), default=0.0))

    def skips(self, step: int) -> bool:
        """Whether a step must not train on its groups."""
        return step in self._skipped

    def roll_back(self, step: int, trip: Trip) -> RolledBackError:
        """Remember, durably, that a step is to be skipped; returns the error that ends this life.

        Raises:
            GuardStopError: the run was rolled back as often as it may be.
        """
        if len(self._done) >= self._limit:
            steps = ", ".join(str(one["step"]) for one in self._done)
            before = f" (before: steps {steps})" if steps else ""
            raise stopped(step, trip, f"trainer.guards.max_rollbacks = {self._limit} are used up{before}, ")
        entry = {"step": step, "guard": trip.guard, "reason": trip.reason, "time": time.time()}
        write_json(self._path, [*self._done, entry])
        return RolledBackError(
            f"guard '{trip.guard}' at step {step}: {trip.reason}: the next start goes on from the newest checkpoint "
            f"and skips this step's groups (rollback {len(self._done) + 1} of {self._limit})"
        )


def stopped(step: int, trip: Trip, because: str = "") -> GuardStopError:
    """The error that ends the run."""
    return GuardStopError(
        f"guard '{trip.guard}' stopped the run at step {step}: {trip.reason}: {because}look at metrics.jsonl and the "
        f"trajectories; to go on from the newest checkpoint change the settings, trainer.guards.{trip.guard} or others"
    )
