"""The time in which the rollout service samples nothing for training, because the trainer has not issued more."""

from __future__ import annotations

from collections.abc import Sequence

from forage_queue.streams.client import Entry
from forage_trajectory.trajectory import Group


class IdleTime:
    """Measures the pauses between batches, by the times of their groups.

    Redis gives each entry the time of its arrival (the milliseconds of its id); a group was begun as long before as its
    longest trajectory took. Groups that were dropped, and validations, are not seen: what was spent on them counts as a
    pause.
    """

    def __init__(self) -> None:
        self._until: float | None = None

    def measure(self, entries: Sequence[Entry[Group]]) -> float | None:
        """Measure the seconds between the last group of the batches before and the begin of this batch's first.

        Returns:
            0 where batches overlap; None for the first batch that this process sees.
        """
        arrived = [int(entry.id.partition(b"-")[0]) / 1000 for entry in entries]
        begun = [time - _measure_duration(entry.message) for time, entry in zip(arrived, entries, strict=True)]
        idle = None if self._until is None or not begun else max(0.0, min(begun) - self._until)
        self._until = max([*arrived, *([] if self._until is None else [self._until])], default=None)
        return idle


def _measure_duration(group: Group) -> float:
    """Seconds of the longest trajectory, from its first request to its score."""
    return max((t.timings.total_s + t.timings.score_s for t in group.trajectories), default=0.0)
