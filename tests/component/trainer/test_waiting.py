"""A stop that signals ask for, while the main thread goes in and out of its sleep."""

from __future__ import annotations

import subprocess
import sys

from waiting import WAIT_S

SLEEPS = """
import signal
from forage_runtime.stop import Stop, Stopped

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
    done = subprocess.run([sys.executable, "-c", SLEEPS], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "awake\n", done.stderr
