"""Every step of a run has groups to take, also where the steps before it had another size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
from arrived_groups import arrive

from forage_proto.v1.trajectory_pb2 import GroundTruth, Prompt, TrajectoryGroup
from forage_queue.streams.client import Entry, StreamClient
from forage_queue.trainer.feeder import Batches, Feeder
from forage_queue.trainer.slots import BufferedGroup, ConsumedSlots, ReadyOrder, Slot
from forage_records.questions import Question
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import load_settings
from forage_trainer.data.tensors import has_equal_rewards

STEPS, STALENESS = 8, 2
ROWS = tuple(Question("q", "train", i, (), GroundTruth(targets=[str(i)]), str(i)) for i in range(40))


class IssuedStreams:
    """A server that notes what is issued."""

    trajectories = "trajectories"

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []

    def issue(self, prompt: Prompt) -> bool:
        self.prompts.append(prompt)
        return True


def call(function: Callable[[], Any]) -> Any:
    return function()


def build_feeder(size: int) -> tuple[Feeder, IssuedStreams]:
    overrides = [f"data.train_batch_size={size}", "trainer.batching=ready", f"trainer.max_staleness={STALENESS}"]
    settings = load_settings(None, [*overrides, f"trainer.total_training_steps={STEPS}"], {})
    streams = IssuedStreams()
    batches, equal = (
        Batches(ROWS, size, 0),
        partial(has_equal_rewards, estimator=settings.trainer.algorithm.adv_estimator),
    )
    return Feeder(settings, cast(StreamClient, streams), batches, cast(RedisRetry, call), equal), streams


def take(feeder: Feeder, size: int, steps: range, order: Callable[[list[Slot]], list[Slot]] = sorted) -> list[int]:
    """Take steps of all groups that were issued, in the order in which they arrive; the slots of each step."""
    ready, counts = ReadyOrder(size, STALENESS, feeder.list_open), []
    for step in steps:
        feeder.issue_up_to_bound(step - 1)
        held = {
            slot: BufferedGroup(Entry(b"%d-0" % number, arrive(TrajectoryGroup())), step - 1)
            for number, slot in enumerate(order(feeder.list_open()))
        }
        taken, missing = ready.choose(step, held)
        assert missing == [], f"step {step} waits for ever"
        feeder.settled.settle(step, taken)
        counts.append(len(taken))
    return counts


def take_last(slots: list[Slot]) -> list[Slot]:
    return sorted(slots, reverse=True)


def take_low(slots: list[Slot]) -> list[Slot]:
    return sorted(slots, key=lambda slot: slot[1])


@pytest.mark.parametrize(("before", "after"), [(8, 4), (8, 2), (6, 4), (4, 4), (4, 8)])
@pytest.mark.parametrize("order", [sorted, take_last, take_low], ids=["first", "last", "low"])
@pytest.mark.parametrize("taken", [1, 3])
def test_a_run_that_goes_on_with_another_batch_size_has_groups_for_its_last_steps(
    before: int, after: int, order: Callable[[list[Slot]], list[Slot]], taken: int
) -> None:
    first, _ = build_feeder(before)
    first.align(0)
    take(first, before, range(1, taken + 1), order)
    feeder, streams = build_feeder(after)
    feeder.settled.load_state_dict(first.settled.state_dict())
    feeder.align(taken)
    assert take(feeder, after, range(taken + 1, STEPS + 1), order) == [after] * (STEPS - taken)
    slots = [(prompt.batch, prompt.position) for prompt in streams.prompts]
    assert len(slots) == len(set(slots))
    assert not any(slot in first.settled for slot in slots), "what is settled, and batches that are over, stay so"
    assert 0 <= len(slots) - (STEPS - taken) * after < after, "as many as the steps need, in whole batches"


def test_no_group_is_asked_for_under_a_version_that_never_comes() -> None:
    first, _ = build_feeder(8)
    first.align(0)
    take(first, 8, range(1, 4), take_low)
    feeder, streams = build_feeder(2)
    feeder.settled.load_state_dict(first.settled.state_dict())
    feeder.align(3)
    take(feeder, 2, range(4, STEPS + 1))
    last = max(prompt.batch for prompt in streams.prompts)
    feeder.issue_again(last, 0, attempt=1)
    assert last > STEPS
    assert streams.prompts[-1].min_policy_version == STEPS - 1


def test_the_settled_places_of_a_smaller_batch_are_counted() -> None:
    settled = ConsumedSlots(2)
    settled.load_state_dict({"batches": 1, "places": [[2, 0, 2], [2, 3, 2], [3, 1, 2]], "size": 4})
    assert settled.count_ahead() == 2, "position 3 is none of a batch of two"
