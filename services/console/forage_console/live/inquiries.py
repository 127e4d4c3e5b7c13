"""Questions to services: a look waits for the answers that come soon, and a later look finds those that come late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from forage_runtime.telemetry.logs import get_logger

A = TypeVar("A")
_FRESH_S = 10.0
"""An answer that nobody read for so long tells nothing of now."""


@dataclass
class Inquiry(Generic[A]):
    """A question, and its answer once it ended.

    Attributes:
        before: the last answer to the same question, if it came a moment before this question.
    """

    begun: float
    before: A | None
    answer: A | None = None
    ended: float | None = None
    is_read: bool = False
    over: threading.Event = field(default_factory=threading.Event)


class Inquiries(Generic[A]):
    """Asks on threads, and never a second time while a question has no answer. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._latest: dict[str, Inquiry[A]] = {}
        self._lock = threading.Lock()

    def begin(self, key: str, ask: Callable[[], A]) -> Inquiry[A]:
        """Ask, unless the same question waits for its answer, or nobody has read its late answer yet."""
        with self._lock:
            now, latest = self.clock(), self._latest.get(key)
            is_fresh = latest is not None and latest.ended is not None and now - latest.ended < _FRESH_S
            if latest is not None and (latest.ended is None or (is_fresh and not latest.is_read)):
                return latest
            one = self._latest[key] = Inquiry(now, latest.answer if latest is not None and is_fresh else None)
        threading.Thread(target=self._run, args=(one, ask), daemon=True).start()
        return one

    def read(self, one: Inquiry[A]) -> A | float:
        """Return the answer, or else for how many seconds the question has waited for it."""
        with self._lock:
            one.is_read = one.ended is not None
            return self.clock() - one.begun if one.answer is None else one.answer

    def _run(self, one: Inquiry[A], ask: Callable[[], A]) -> None:
        try:
            one.answer = ask()
        except Exception:  # noqa: BLE001 - a thread of its own has nobody else to tell
            get_logger().exception("inquiry_failed")
        finally:
            with self._lock:
                one.ended = self.clock()
            one.over.set()
