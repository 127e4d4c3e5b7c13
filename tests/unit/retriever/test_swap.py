"""Reloads that are asked for while an index is being loaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from forage_retriever.index.load import Index
from forage_retriever.serve import swap as swaps
from forage_retriever.serve.retrieval import Retrieval
from forage_retriever.serve.swap import IndexSwap, ReloadError
from forage_runtime.errors import DataError
from forage_runtime.settings import Settings


class Loader:
    """Gives an index whenever it is open; counts what it has begun."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.begun = 0
        self.fails = False
        self.open = threading.Event()

    def load(self, *_: object) -> Index:
        self.begun += 1
        assert self.open.wait(120)
        if self.fails:
            raise DataError("damaged")
        return self.index


@pytest.fixture
def loader(loaded: Index, monkeypatch: pytest.MonkeyPatch) -> Loader:
    made = Loader(loaded)
    monkeypatch.setattr(swaps.index, "load_index", made.load)
    return made


async def wait_until(true: Callable[[], bool]) -> None:
    """Let tasks and the thread of the load go on until it is so."""
    while not true():
        await asyncio.sleep(0)


def is_done(swap: IndexSwap) -> bool:
    """Whether it loads nothing, and will load nothing."""
    return not swap._loading and not swap._is_queued and swap._reloading is not None and swap._reloading.done()


def list_events(logs: list[Any]) -> list[str]:
    return [one["event"] for one in logs if one["event"] != "act"]


async def test_signals_during_a_load_are_one_more_reload_after_it(loader: Loader) -> None:
    core = Retrieval(3, 300.0)
    swap = IndexSwap(Settings(), core)
    first = asyncio.create_task(swap.load_first(lambda _: None))
    await wait_until(lambda: loader.begun == 1)
    with capture_logs() as logs:
        for _ in range(3):
            swap.schedule_reload()
        loader.open.set()
        await first
        await wait_until(lambda: is_done(swap))
        assert (loader.begun, list_events(logs).count("reload_queued")) == (2, 3)
        loader.open.clear()
        swap.schedule_reload()
        swap.schedule_reload()  # before the first one has begun
        await wait_until(lambda: loader.begun == 3)
        with pytest.raises(ReloadError, match="being loaded already"):
            await swap.reload("127.0.0.1")
        loader.open.set()
        await wait_until(lambda: is_done(swap))
    assert loader.begun == 4
    await core.stop()


async def test_a_signal_during_a_reload_that_fails_is_not_lost(loader: Loader) -> None:
    core = Retrieval(3, 300.0)
    swap = IndexSwap(Settings(), core)
    loader.open.set()
    await swap.load_first(lambda _: None)
    loader.open.clear()
    loader.fails = True
    with capture_logs() as logs:
        swap.schedule_reload()
        await wait_until(lambda: loader.begun == 2)
        swap.schedule_reload()
        loader.open.set()
        await wait_until(lambda: is_done(swap))
    assert (loader.begun, list_events(logs).count("reload_failed")) == (3, 2)
    await core.stop()
