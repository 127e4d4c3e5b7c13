"""A stop that signals ask for, while the main thread goes in and out of its sleep."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from forage_common.stop import Stop, Stopped

SLEEPS = """
import signal
from forage_common.stop import Stop, Stopped

stop = Stop()
signal.signal(signal.SIGALRM, lambda *_: stop.request())
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
for _ in range(5000):
    try:
        stop.sleep(0.0001)
    except Stopped:
        stop = Stop()
print("awake")
"""


def test_a_signal_at_any_moment_of_a_sleep_ends_it() -> None:
    done = subprocess.run([sys.executable, "-c", SLEEPS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "awake\n", done.stderr


def test_a_stop_wakes_every_sleeper() -> None:
    stop, ended = Stop(), []

    def sleep() -> None:
        with pytest.raises(Stopped):
            stop.sleep(60)
        ended.append(1)

    threads = [threading.Thread(target=sleep, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    stop.request()
    for thread in threads:
        thread.join(20)
    assert len(ended) == 3
    assert stop.is_requested
