"""A stop ends every wait."""

from __future__ import annotations

import threading

import pytest
from limits import WAIT_S

from forage_runtime.stop import Stop, Stopped


def test_a_stop_wakes_every_sleeper() -> None:
    stop, ended = Stop(), []

    def sleep() -> None:
        with pytest.raises(Stopped):
            stop.sleep(3600)  # lint: sleep because the stop ends it
        ended.append(1)

    threads = [threading.Thread(target=sleep, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    stop.request()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(ended) == 3
    assert stop.is_requested
