"""Which groups a step takes, whatever the order in which they arrive: every slot is settled once, none too old."""

from __future__ import annotations

import random
from itertools import count

import pytest
from arrived_groups import arrive
from trainer_parts import make_group

from forage_queue.streams.client import Entry
from forage_queue.trainer.slots import BufferedGroup, ConsumedSlots, ReadyOrder, Slot, StrictOrder, list_positions

SIZE, STALENESS = 3, 2
_ids = count(1)


def hold(oldest: int | None = 0) -> BufferedGroup:
    """A group that arrives now."""
    return BufferedGroup(Entry(b"%d-0" % next(_ids), arrive(make_group("q", [0.0]))), oldest)


class Run:
    """Steps of a run over groups that others hold; what the batcher does around `ReadyOrder`."""

    def __init__(self, total: int, staleness: int = STALENESS) -> None:
        self.total = total
        self.staleness = staleness
        self.settled = ConsumedSlots(SIZE)
        self.order = ReadyOrder(SIZE, staleness, lambda: list(self.settled.list_open(self.issued)))
        self.held: dict[Slot, BufferedGroup] = {}
        self.steps: dict[int, list[Slot]] = {}
        self.dropped: list[tuple[int, Slot]] = []

    @property
    def number(self) -> int:
        """The step that comes next."""
        return len(self.steps) + 1

    @property
    def issued(self) -> int:
        return min(self.number + self.staleness, self.total)

    def list_missing(self) -> list[Slot]:
        return [slot for slot in self.order.list_candidates(self.number) if slot not in self.held]

    def step(self) -> bool:
        """Take the next step, if what it needs is there."""
        bound = self.number - 1 - self.staleness
        for slot in self.order.list_candidates(self.number):
            if slot in self.held and (oldest := self.held[slot].oldest) is not None and oldest < bound:
                del self.held[slot]
                self.order.note_stale(self.number, slot)
                self.dropped.append((self.number, slot))
        taken, missing = self.order.choose(self.number, self.held)
        assert len(taken) + len(missing) == SIZE
        if missing:
            return False
        for slot in taken:
            oldest = self.held.pop(slot).oldest
            assert oldest is None or oldest >= bound
        self.settled.settle(self.number, taken)
        self.steps[self.number] = taken
        return True


def test_a_strict_step_takes_its_batch() -> None:
    order = StrictOrder(SIZE)
    held = {(1, 0): hold(), (2, 1): hold(), (1, 2): hold()}
    assert order.choose(1, held) == ([(1, 0), (1, 2)], [(1, 1)])
    assert order.choose(2, held) == ([(2, 1)], [(2, 0), (2, 2)])


def test_the_oldest_tokens_go_first_and_then_what_came_first() -> None:
    run = Run(9)
    for slot, oldest in (((3, 0), 1), ((2, 2), 1), ((1, 1), 0), ((2, 0), None), ((1, 0), 2)):
        run.held[slot] = hold(oldest)
    assert run.order.choose(1, run.held) == ([(2, 0), (1, 1), (3, 0)], [])


def test_what_is_missing_is_what_was_issued_first() -> None:
    run = Run(9)
    run.held[2, 1] = hold()
    assert run.order.choose(1, run.held) == ([(2, 1)], [(1, 0), (1, 1)])


def test_a_group_that_was_too_old_is_waited_for_by_the_last_step_that_can_take_it() -> None:
    run = Run(20, staleness=1)
    slow = (1, 0)
    for number in (1, 2, 3):
        for slot in run.list_missing():
            if slot != slow:
                run.held[slot] = hold(number - 1)
        if number == 3:
            run.held[slow] = hold(0)  # it took two steps
        assert run.step()
    assert run.dropped == [(3, slow)]
    for slot in run.list_missing():
        if slot != slow:
            run.held[slot] = hold(3)
    assert not run.step(), "step 4 is the last that may take tokens of version 2, which it is sampled under"
    assert run.order.choose(4, run.held)[1] == [slow]
    run.held[slow] = hold(2)
    assert run.step()
    assert slow in run.steps[4]


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_arrivals_settles_every_place_once(seed: int) -> None:
    """Versions as engines give them: not before the slot was issued or issued again, not above the newest."""
    draw = random.Random(seed)
    run = Run(draw.randint(1, 12), staleness=draw.randint(1, 3))
    began: dict[Slot, int] = {}
    turns = 0
    while run.number <= run.total:
        turns += 1
        assert turns < 10_000, "it does not end"
        missing = run.list_missing()
        for slot in missing:
            began.setdefault(slot, draw.randint(max(0, run.number - 2), run.number - 1))
        if missing:
            slot = draw.choice(missing[-SIZE:] if draw.random() < 0.7 else missing)  # the newest are the quickest
            run.held[slot] = hold(None if draw.random() < 0.1 else began[slot])
        run.step()
        for _, slot in run.dropped:
            if slot not in run.held and slot not in run.settled:
                began[slot] = max(began[slot], run.number - 1)
    settled = [slot for taken in run.steps.values() for slot in taken]
    assert sorted(settled) == [(batch, position) for batch in range(1, run.total + 1) for position in range(SIZE)]
    assert run.settled.floor == run.total


def test_no_group_that_is_there_becomes_too_old_if_all_come_in_time() -> None:
    """The first deadline first: of groups that arrive before theirs, as many as steps can take, none is dropped."""
    for seed in range(30):
        draw = random.Random(seed)
        run = Run(12)
        while run.number <= run.total:
            for slot in draw.sample(missing := run.list_missing(), len(missing)):
                run.held[slot] = hold(run.number - 1)
            assert run.step()
        assert run.dropped == []


def test_slots_of_a_step_that_was_rolled_back_are_its_own() -> None:
    run = Run(9)
    own = [(1, 0), (2, 0), (3, 2)]
    run.order.restart(run.settled, 0, {}, {2: own})
    for slot in run.list_missing():
        run.held[slot] = hold()
    assert run.step()
    assert not set(run.steps[1]) & set(own)
    del run.held[3, 2]
    assert not run.step(), "it waits for all of them"
    run.held[3, 2] = hold()
    assert run.step()
    assert sorted(run.steps[2]) == own
    assert run.step()


def test_the_state_of_a_checkpoint_says_which_step_settled_what() -> None:
    settled = ConsumedSlots(SIZE)
    settled.settle(1, [(1, 0), (1, 1), (2, 0)])
    assert settled.find_ends([(1, 2), (2, 1)]) == (1,)
    settled.settle(2, [(1, 2), (3, 0), (3, 1)])
    assert (settled.floor, settled.is_over(1), settled.is_over(2)) == (1, True, False)
    assert settled.step_of((1, 2)) == 2
    settled.forget(1)
    assert settled.step_of((1, 0)) == 1, "step 2 has a place of its batch, and may be taken again"
    again = ConsumedSlots(SIZE)
    again.load_state_dict(settled.state_dict())
    assert again.state_dict() == settled.state_dict()
    assert list(again.list_open(3)) == [(2, 1), (2, 2), (3, 2)]
    settled.forget(2)
    assert settled.step_of((1, 0)) == 0
    assert (1, 0) in settled
    assert settled.state_dict() == {"batches": 1, "places": [[2, 0, 1], [3, 0, 2], [3, 1, 2]], "size": SIZE}


def test_smaller_batches_forget_positions_that_are_no_more() -> None:
    before, after = ConsumedSlots(SIZE), ConsumedSlots(2)
    before.settle(1, [(1, 0), (1, 2), (2, 1)])
    after.load_state_dict(before.state_dict())
    assert list(after.list_open(2)) == [(1, 1), (2, 0)]


def test_groups_of_several_batches_are_counted_and_those_of_one_keep_their_positions() -> None:
    one = [arrive(make_group("q", [0.0], 4, position)) for position in (0, 2)]
    assert list_positions(one) == [0, 2]
    assert list_positions([*one, arrive(make_group("q", [0.0], 5, 0))]) == [0, 1, 2]
