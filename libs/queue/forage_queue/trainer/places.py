"""Places, the positions of batches: which are settled, and which a step takes. One group counts for a place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forage_queue.streams.client import Entry
from forage_trajectory.trajectory import Group

Place = tuple[int, int]
"""(batch, position)"""
PlacesOfSteps = Mapping[int, Collection[Place]]
PLACES = "places"
"""The part of a checkpoint with the state of `ConsumedSlots`; only with trainer.batching=ready."""


def place_of(group: Group) -> Place:
    """The place that a group was issued for."""
    return group.batch, group.position


@dataclass(frozen=True)
class BufferedGroup:
    """A group that waits for its step. oldest: the lowest policy version of any token; None for one without tokens."""

    entry: Entry[Group]
    oldest: int | None


class ConsumedSlots:
    """The places that are settled: a step has trained on their group, or has dropped them.

    A batch is over once all its places are. With trainer.batching=strict step n settles batch n and nothing else; with
    ready a step settles places of several batches, and later steps the rest of them. The state is part of every
    checkpoint then.
    """

    def __init__(self, size: int) -> None:
        """
        Args:
            size: places of a batch.
        """
        self._size = size
        self.restart(0)

    def restart(self, floor: int) -> None:
        """Begin anew where the batches up to this one are over, and no place of a later one is settled."""
        self._floor = self._forgotten = floor
        self._steps: dict[Place, int] = {}
        self._counts: Counter[int] = Counter()

    @property
    def floor(self) -> int:
        """Every batch up to this one is over."""
        return self._floor

    def count_ahead(self) -> int:
        """Count the settled places of batches that are not over."""
        return sum(place[0] > self._floor for place in self._steps)

    def __contains__(self, place: Place) -> bool:
        return place[0] <= self._floor or place in self._steps

    def is_over(self, batch: int) -> bool:
        """Whether every place of a batch is settled."""
        return batch <= self._floor or self._counts[batch] == self._size

    def step_of(self, place: Place) -> int:
        """The step that settled a place; 0 where that is forgotten."""
        return self._steps.get(place, 0)

    def list_open(self, last: int) -> Iterator[Place]:
        """The places up to batch `last` that are not settled, in the order of batches."""
        for batch in range(self._floor + 1, last + 1):
            for position in range(self._size):
                if (batch, position) not in self._steps:
                    yield batch, position

    def find_ends(self, places: Iterable[Place]) -> tuple[int, ...]:
        """The batches that are over once these open places are settled too."""
        new = Counter(batch for batch, _ in places)
        return tuple(sorted(batch for batch, count in new.items() if self._counts[batch] + count == self._size))

    def settle(self, step: int, places: Iterable[Place]) -> None:
        """Settle places by a step."""
        for place in places:
            if place not in self and place[1] < self._size:
                self._steps[place] = step
                self._counts[place[0]] += 1
        while self._counts[self._floor + 1] == self._size:
            self._floor += 1

    def forget(self, step: int) -> None:
        """Forget which steps up to this one, whose checkpoint is durable, settled the batches that are over."""
        kept = {place[0] for place, by in self._steps.items() if by > step} | {self._floor + 1}
        self._forgotten = max(self._forgotten, min(kept) - 1)
        self._steps = {place: by for place, by in self._steps.items() if place[0] > self._forgotten}
        self._counts = Counter({batch: count for batch, count in self._counts.items() if batch > self._forgotten})

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready, for a checkpoint: the batches that are over and forgotten, and [batch, position, step] …"""
        places = sorted([*place, step] for place, step in self._steps.items())
        return {"batches": self._forgotten, "places": places, "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, also that of another size: a batch that was over stays over, and gets no more places."""
        self.restart(int(state["batches"]))
        counts: Counter[int] = Counter()
        for batch, position, step in state["places"]:
            self.settle(step, [(batch, position)])
            counts[batch] += 1
            if counts[batch] == state.get("size", self._size):
                self.settle(step, [(batch, each) for each in range(self._size)])


class StrictOrder:
    """Step n takes batch n (trainer.batching=strict)."""

    def __init__(self, size: int) -> None:
        """
        Args:
            size: groups of a step.
        """
        self._size = size

    def restart(self, settled: ConsumedSlots, consumed: int, *_: object) -> None:
        """Begin after step `consumed`, which settled the batch of its number."""
        settled.restart(consumed)

    def list_candidates(self, number: int) -> list[Place]:
        """The places of which step `number` takes some."""
        return [(number, position) for position in range(self._size)]

    def choose(self, number: int, held: Mapping[Place, BufferedGroup]) -> tuple[list[Place], list[Place]]:
        """The places that step `number` takes of what is there, and those that it lacks; together its size."""
        places = self.list_candidates(number)
        return [place for place in places if place in held], [place for place in places if place not in held]

    def note_stale(self, number: int, place: Place) -> int:
        """Note that the group of a place was too old for step `number`; returns the version to ask for, at least."""
        return 0

    def reserve(self, places: Iterable[Place]) -> tuple[Place, ...]:
        """Those of a step's places that a rollback must keep for it: it would take others otherwise."""
        return ()


class ReadyOrder:
    """A step takes the first groups that are there, whatever batch they were issued for (trainer.batching=ready).

    Whatever is there: first those with the oldest tokens, which would be too old first, then those that came first. So
    no group that could be taken becomes too old, if any choice avoids it.

    A group that was too old is sampled again, and the last step that could take it waits for it: else what takes
    longest would never be trained on.
    """

    def __init__(self, size: int, max_staleness: int, list_open: Callable[[], list[Place]]) -> None:
        """
        Args:
            size: groups of a step.
            list_open: lists the places that were issued and are not settled.
        """
        self._size = size
        self._max_staleness = max_staleness
        self._list_open = list_open
        self._reserved: dict[int, frozenset[Place]] = {}
        self._last_steps: dict[Place, int] = {}

    def restart(self, settled: ConsumedSlots, consumed: int, replayed: PlacesOfSteps, reserved: PlacesOfSteps) -> None:
        """Begin after step `consumed`.

        Args:
            settled: as of the newest checkpoint.
            replayed: what the steps between that and `consumed` have settled.
            reserved: what a step takes, and no other: that of steps that were rolled back.
        """
        for step, places in replayed.items():
            settled.settle(step, places)
        self._reserved = {step: frozenset(places) for step, places in reserved.items()}

    def list_candidates(self, number: int) -> list[Place]:
        """As of `StrictOrder`, like all that follow."""
        return self._list_open()

    def choose(self, number: int, held: Mapping[Place, BufferedGroup]) -> tuple[list[Place], list[Place]]:
        """Of what it lacks, those that it waits for by name come first, then those that were issued first."""
        own: frozenset[Place] = self._reserved.get(number, frozenset())
        later = {place for step, places in self._reserved.items() if step > number for place in places}
        here: list[tuple[int, tuple[int, ...], Place]] = []
        absent: list[tuple[int, Place]] = []
        # Its own may not be issued yet: the policy that allows that may be announced beside this step.
        for place in {*self._list_open(), *own} - later:
            rank = 0 if place in own else 1 if self._last_steps.get(place, number + 1) <= number else 2
            if place in held:
                here.append((rank, _age(held[place]), place))
            else:
                absent.append((rank, place))
        awaited = sum(rank < 2 for rank, _ in absent)
        taken = [place for *_, place in sorted(here)[: max(0, self._size - awaited)]]
        return taken, [place for _, place in sorted(absent)[: self._size - len(taken)]]

    def note_stale(self, number: int, place: Place) -> int:
        # Of the version that trains now, which may be announced beside this step. The next steps can use it.
        self._last_steps = {p: step for p, step in self._last_steps.items() if step >= number}  # others are settled
        self._last_steps[place] = number + self._max_staleness
        return number - 1

    def reserve(self, places: Iterable[Place]) -> tuple[Place, ...]:
        return tuple(sorted(places))


def _age(held: BufferedGroup) -> tuple[int, int, int]:
    """Sorts groups: the oldest tokens first, then the first to arrive."""
    arrived, _, number = held.entry.id.partition(b"-")
    return -1 if held.oldest is None else held.oldest, int(arrived), int(number)


def list_slots(groups: Sequence[Group]) -> list[int]:
    """The slot of each group in its step, by which mini-batches are cut: its position, where all are of one batch.

    Groups of one batch so keep their mini-batch where others are missing. Those of several are counted.
    """
    if len({group.batch for group in groups}) <= 1:
        return [group.position for group in groups]
    return list(range(len(groups)))
