"""A request to stop, by a signal or by the program, that waits can be ended by."""

from __future__ import annotations

import contextlib
import signal
from queue import Empty, SimpleQueue

from forage_runtime.errors import InterruptedWorkError


class Stopped(InterruptedWorkError):
    """The process was asked to stop."""


class Stop:
    """A flag that long waits look at. Thread-safe.

    Not an Event: a signal handler that sets an Event while `wait` holds the Event's lock would deadlock.
    """

    def __init__(self) -> None:
        self._requested = False
        self._wake: SimpleQueue[None] = SimpleQueue()

    def request(self) -> None:
        self._requested = True
        self._wake.put(None)

    @property
    def is_requested(self) -> bool:
        return self._requested

    def install_handler(self, *numbers: signal.Signals) -> None:
        """Set the flag on these signals, SIGTERM where none is given (main thread only)."""
        for number in numbers or (signal.SIGTERM,):
            signal.signal(number, lambda *_: self.request())

    def wait(self) -> None:
        """Block until a stop is requested."""
        self._wake.get()
        self._wake.put(None)  # wake the other waiters too

    def check(self) -> None:
        """Mark a safe point to stop at.

        Raises:
            Stopped: the flag is set.
        """
        if self._requested:
            raise Stopped("asked to stop")

    def sleep(self, seconds: float) -> None:
        """Sleep, at most until a stop is requested.

        Raises:
            Stopped: the flag is set.
        """
        with contextlib.suppress(Empty):
            self._wake.get(timeout=seconds)
            self._wake.put(None)  # wake the other sleepers too
        self.check()
