"""A group that is nowhere is asked for again, by the batcher that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from forage_queue.streams.client import StreamClient
from forage_queue.trainer.batcher import Batcher
from forage_queue.trainer.feeder import Feeder
from forage_queue.trainer.slots import ConsumedSlots
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import load_settings
from forage_runtime.telemetry.health import Health


class EmptyStreams:
    """A server that has what was issued, and neither a prompt nor a group."""

    trajectories = "trajectories"

    def __init__(self) -> None:
        self.claims = 0

    def claim_groups(self, stream: str, count: int, block_s: float, is_over: Callable[[], bool]) -> list[Any]:
        self.claims += 1
        assert self.claims < 20, "it is waited for, and nobody was asked again"
        return []

    def reclaim_groups(self, stream: str, known: set[bytes], is_over: Callable[[], bool]) -> list[Any]:
        return []

    def has_unread(self, stream: str) -> bool:
        return False

    def count_backlog(self, stream: str) -> int:
        return 0

    def find_absent(self, stream: str, batch: int) -> set[tuple[int, int]]:
        return {(0, 0), (0, 1)}

    def read_issues(self, stream: str, batch: int) -> dict[tuple[int, int], str]:
        return {(0, 0): "nq/train/7/0", (0, 1): "nq/train/8/r1.0.1"}


class IssuedAgain(Exception):
    """What was asked for again."""


class AskedFeeder:
    """Ends the wait when a group is issued again."""

    settled = ConsumedSlots(1)

    def issue_again(self, *issue: int) -> None:
        raise IssuedAgain(*issue)


def call(function: Callable[[], Any]) -> Any:
    return function()


def test_a_lost_group_is_issued_again_with_the_next_attempt_at_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forage_queue.trainer.batcher.SILENCE_S", -1.0)
    batcher = Batcher(
        cast(StreamClient, EmptyStreams()),
        1,
        load_settings(None, []).trainer,
        cast(Feeder, AskedFeeder()),
        cast(RedisRetry, call),
        Health(),
    )
    with pytest.raises(IssuedAgain) as asked:
        batcher.next_batch(1, 60.0)
    assert asked.value.args == (1, 0, 2, 1), (
        "batch, position, attempt, and the question that took its first one's place"
    )
