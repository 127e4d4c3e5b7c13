"""Rollbacks of a run: `<run folder>/rollbacks.json`, which every later process of the trainer reads.

A rollback ends the process before the step's policy is published and before its groups are acknowledged. The next
process resumes from the newest checkpoint, reclaims the same groups, and takes the same steps again. The step that
tripped the guard then only consumes its groups: no group is lost, and none is trained on twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from forage_queue.trainer.slots import Slot, SlotsOfSteps
from forage_runtime.errors import RolledBackError, UserError
from forage_runtime.files.folders import write_json
from forage_trainer.reporting.guards import Trip

ROLLBACKS = Gauge("forage_trainer_rollbacks", "Rollbacks of this run, restarts included")
ROLLED_BACK = Gauge("forage_trainer_last_rollback_timestamp_seconds", "Unix time of the last rollback; 0 = none")


class GuardStopError(UserError):
    """A guard ended the run; a start with the same settings would end the same way."""


class Rollbacks:
    """The rollbacks of one run."""

    def __init__(self, folder: Path, limit: int) -> None:
        """
        Args:
            folder: the run's folder.
            limit: allowed rollbacks; the next trip stops the run.

        Raises:
            UserError: the file is not readable.
        """
        self._path = folder / "rollbacks.json"
        self._limit = limit
        try:
            self._entries: list[dict[str, Any]] = (
                json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else []
            )
            self._skipped = {int(entry["step"]) for entry in self._entries}
            self._slots: SlotsOfSteps = {
                int(entry["step"]): [(int(batch), int(position)) for batch, position in entry.get("places", ())]
                for entry in self._entries
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._path} cannot be read ({error!r}): it lists steps to skip; repair or remove it"
            ) from None
        # A rollback ends the process before Prometheus scrapes it, so the next process exports it.
        ROLLBACKS.set(len(self._entries))
        ROLLED_BACK.set(max((float(entry.get("time", 0.0)) for entry in self._entries), default=0.0))

    @property
    def slots(self) -> SlotsOfSteps:
        """What each of these steps took, where trainer.batching=ready may give it others."""
        return self._slots

    def is_skipped(self, step: int) -> bool:
        """Whether a step must not train on its groups."""
        return step in self._skipped

    def roll_back(self, step: int, trip: Trip, slots: Sequence[Slot] = ()) -> RolledBackError:
        """Record durably that a step is to be skipped; returns the error that ends this process.

        Args:
            slots: what it has taken, for `slots`; empty where it takes the same ones again anyway.

        Raises:
            GuardStopError: no further rollback is allowed.
        """
        if len(self._entries) >= self._limit:
            steps = ", ".join(str(entry["step"]) for entry in self._entries)
            before = f" (before: steps {steps})" if steps else ""
            raise make_stop_error(step, trip, f"trainer.guards.max_rollbacks = {self._limit} are used up{before}, ")
        entry = {"step": step, "guard": trip.guard, "reason": trip.reason, "time": time.time()}
        entry |= {"places": slots} if slots else {}
        write_json(self._path, [*self._entries, entry])
        return RolledBackError(
            f"guard '{trip.guard}' at step {step}: {trip.reason}: the next start resumes from the newest checkpoint "
            f"and skips this step's groups (rollback {len(self._entries) + 1} of {self._limit})"
        )


def make_stop_error(step: int, trip: Trip, because: str = "") -> GuardStopError:
    """Make the error that ends the run."""
    return GuardStopError(
        f"guard '{trip.guard}' stopped the run at step {step}: {trip.reason}: {because}look at metrics.jsonl and the "
        "trajectories; to resume from the newest checkpoint change the settings, "
        f"trainer.guards.actions.{trip.guard} or others"
    )
