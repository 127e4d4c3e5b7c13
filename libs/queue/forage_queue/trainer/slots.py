"""Slots, the positions of batches: which are settled, and which a step takes. One group counts for a slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forage_queue.streams.client import Entry
from forage_trajectory.trajectory import Group

Slot = tuple[int, int]
"""(batch, position)"""
SlotsOfSteps = Mapping[int, Collection[Slot]]
SLOTS = "places"
"""The part of a checkpoint with the state of `ConsumedSlots`; only with trainer.batching=ready."""


def slot_of(group: Group) -> Slot:
    """The slot that a group was issued for."""
    return group.batch, group.position


@dataclass(frozen=True)
class BufferedGroup:
    """A group that waits for its step. oldest: the lowest policy version of any token; None for one without tokens."""

    entry: Entry[Group]
    oldest: int | None


class ConsumedSlots:
    """The slots that are settled: a step has trained on their group, or has dropped them.

    A batch is over once all its slots are. With trainer.batching=strict step n settles batch n and nothing else; with
    ready a step settles slots of several batches, and later steps the rest of them. The state is part of every
    checkpoint then.
    """

    def __init__(self, size: int) -> None:
        """
        Args:
            size: slots of a batch.
        """
        self._size = size
        self.restart(0)

    def restart(self, floor: int) -> None:
        """Begin anew where the batches up to this one are over, and no slot of a later one is settled."""
        self._floor = self._forgotten = floor
        self._steps: dict[Slot, int] = {}
        self._counts: Counter[int] = Counter()

    @property
    def floor(self) -> int:
        """Every batch up to this one is over."""
        return self._floor

    def count_ahead(self) -> int:
        """Count the settled slots of batches that are not over."""
        return sum(slot[0] > self._floor for slot in self._steps)

    def __contains__(self, slot: Slot) -> bool:
        return slot[0] <= self._floor or slot in self._steps

    def is_over(self, batch: int) -> bool:
        """Whether every slot of a batch is settled."""
        return batch <= self._floor or self._counts[batch] == self._size

    def step_of(self, slot: Slot) -> int:
        """The step that settled a slot; 0 where that is forgotten."""
        return self._steps.get(slot, 0)

    def list_open(self, last: int) -> Iterator[Slot]:
        """The slots up to batch `last` that are not settled, in the order of batches."""
        for batch in range(self._floor + 1, last + 1):
            for position in range(self._size):
                if (batch, position) not in self._steps:
                    yield batch, position

    def find_ends(self, slots: Iterable[Slot]) -> tuple[int, ...]:
        """The batches that are over once these open slots are settled too."""
        new = Counter(batch for batch, _ in slots)
        return tuple(sorted(batch for batch, count in new.items() if self._counts[batch] + count == self._size))

    def settle(self, step: int, slots: Iterable[Slot]) -> None:
        """Settle slots by a step."""
        for slot in slots:
            if slot not in self and slot[1] < self._size:
                self._steps[slot] = step
                self._counts[slot[0]] += 1
        while self._counts[self._floor + 1] == self._size:
            self._floor += 1

    def forget(self, step: int) -> None:
        """Forget which steps up to this one, whose checkpoint is durable, settled the batches that are over."""
        kept = {slot[0] for slot, by in self._steps.items() if by > step} | {self._floor + 1}
        self._forgotten = max(self._forgotten, min(kept) - 1)
        self._steps = {slot: by for slot, by in self._steps.items() if slot[0] > self._forgotten}
        self._counts = Counter({batch: count for batch, count in self._counts.items() if batch > self._forgotten})

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready, for a checkpoint: the batches that are over and forgotten, and [batch, position, step] …"""
        slots = sorted([*slot, step] for slot, step in self._steps.items())
        return {"batches": self._forgotten, "places": slots, "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, also that of another size: a batch that was over stays over, and gets no more slots."""
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

    def list_candidates(self, number: int) -> list[Slot]:
        """The slots of which step `number` takes some."""
        return [(number, position) for position in range(self._size)]

    def choose(self, number: int, held: Mapping[Slot, BufferedGroup]) -> tuple[list[Slot], list[Slot]]:
        """The slots that step `number` takes of what is there, and those that it lacks; together its size."""
        slots = self.list_candidates(number)
        return [slot for slot in slots if slot in held], [slot for slot in slots if slot not in held]

    def note_stale(self, number: int, slot: Slot) -> int:
        """Note that the group of a slot was too old for step `number`; returns the version to ask for, at least."""
        return 0

    def reserve(self, slots: Iterable[Slot]) -> tuple[Slot, ...]:
        """Those of a step's slots that a rollback must keep for it: it would take others otherwise."""
        return ()


class ReadyOrder:
    """A step takes the first groups that are there, whatever batch they were issued for (trainer.batching=ready).

    Whatever is there: first those with the oldest tokens, which would be too old first, then those that came first. So
    no group that could be taken becomes too old, if any choice avoids it.

    A group that was too old is sampled again, and the last step that could take it waits for it: else what takes
    longest would never be trained on.
    """

    def __init__(self, size: int, max_staleness: int, list_open: Callable[[], list[Slot]]) -> None:
        """
        Args:
            size: groups of a step.
            list_open: lists the slots that were issued and are not settled.
        """
        self._size = size
        self._max_staleness = max_staleness
        self._list_open = list_open
        self._reserved: dict[int, frozenset[Slot]] = {}
        self._last_steps: dict[Slot, int] = {}

    def restart(self, settled: ConsumedSlots, consumed: int, replayed: SlotsOfSteps, reserved: SlotsOfSteps) -> None:
        """Begin after step `consumed`.

        Args:
            settled: as of the newest checkpoint.
            replayed: what the steps between that and `consumed` have settled.
            reserved: what a step takes, and no other: that of steps that were rolled back.
        """
        for step, slots in replayed.items():
            settled.settle(step, slots)
        self._reserved = {step: frozenset(slots) for step, slots in reserved.items()}

    def list_candidates(self, number: int) -> list[Slot]:
        """As of `StrictOrder`, like all that follow."""
        return self._list_open()

    def choose(self, number: int, held: Mapping[Slot, BufferedGroup]) -> tuple[list[Slot], list[Slot]]:
        """Of what it lacks, those that it waits for by name come first, then those that were issued first."""
        own: frozenset[Slot] = self._reserved.get(number, frozenset())
        later = {slot for step, slots in self._reserved.items() if step > number for slot in slots}
        here: list[tuple[int, tuple[int, ...], Slot]] = []
        absent: list[tuple[int, Slot]] = []
        # Its own may not be issued yet: the policy that allows that may be announced beside this step.
        for slot in {*self._list_open(), *own} - later:
            rank = 0 if slot in own else 1 if self._last_steps.get(slot, number + 1) <= number else 2
            if slot in held:
                here.append((rank, _age(held[slot]), slot))
            else:
                absent.append((rank, slot))
        awaited = sum(rank < 2 for rank, _ in absent)
        taken = [slot for *_, slot in sorted(here)[: max(0, self._size - awaited)]]
        return taken, [slot for _, slot in sorted(absent)[: self._size - len(taken)]]

    def note_stale(self, number: int, slot: Slot) -> int:
        # Of the version that trains now, which may be announced beside this step. The next steps can use it.
        self._last_steps = {p: step for p, step in self._last_steps.items() if step >= number}  # others are settled
        self._last_steps[slot] = number + self._max_staleness
        return number - 1

    def reserve(self, slots: Iterable[Slot]) -> tuple[Slot, ...]:
        return tuple(sorted(slots))


def _age(held: BufferedGroup) -> tuple[int, int, int]:
    """Sorts groups: the oldest tokens first, then the first to arrive."""
    arrived, _, number = held.entry.id.partition(b"-")
    return -1 if held.oldest is None else held.oldest, int(arrived), int(number)


def list_positions(groups: Sequence[Group]) -> list[int]:
    """The slot of each group in its step, by which mini-batches are cut: its position, where all are of one batch.

    Groups of one batch so keep their mini-batch where others are missing. Those of several are counted.
    """
    if len({group.batch for group in groups}) <= 1:
        return [group.position for group in groups]
    return list(range(len(groups)))
