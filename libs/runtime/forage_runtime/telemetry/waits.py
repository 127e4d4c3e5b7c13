"""What this process waits for: each wait has a name, whom it waits for, a start and an end.

A wait without a time limit says why it has none. An idle one waits for work: nothing is wrong however long it lasts.
`/waitz` of every service shows the waits, and `forage status` those of a whole run.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


@dataclass
class Wait:
    """One wait that is in progress.

    what: what must happen; the same for all waits of a kind.
    on: the service, or part of one, that must do it.
    detail: the state of this wait, such as "batch 7: 3 of 8 groups missing"; may be set at any time.
    limit_s: seconds after which it ends with an error; None: see `why_unlimited`.
    """

    what: str
    on: str
    detail: str
    limit_s: float | None
    why_unlimited: str = ""
    is_idle: bool = False
    since: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    renewed: float = field(default_factory=time.monotonic)

    def renew(self, ago_s: float = 0.0) -> None:
        """Note that there was progress so many seconds ago: the time limit began anew then."""
        self.renewed = time.monotonic() - ago_s


_ids = itertools.count()
_lock = threading.Lock()
_waits: dict[int, Wait] = {}


@contextmanager
def waiting(
    what: str, *, on: str, limit_s: float | None, detail: str = "", why_unlimited: str = "", idle: bool = False
) -> Iterator[Wait]:
    """Show a wait from here to the end of the block, in any thread or task. The block itself keeps to the limit.

    Raises:
        ValueError: there is neither a limit nor a reason why there is none.
    """
    if (limit_s is None) is not bool(why_unlimited):
        raise ValueError(f"the wait for {what} needs either limit_s or why_unlimited")
    number, wait = next(_ids), Wait(what, on, detail, limit_s, why_unlimited, idle)
    with _lock:
        _waits[number] = wait
    try:
        yield wait
    finally:
        with _lock:
            del _waits[number]


def idling(what: str, *, on: str) -> AbstractContextManager[Wait]:
    """Show a wait for work, as `waiting` does."""
    return waiting(what, on=on, limit_s=None, why_unlimited="idle until there is work", idle=True)


def list_waits(process: str = "") -> list[dict[str, Any]]:
    """List the waits as `/waitz` shows them, the oldest first; of those of a kind, the oldest and their number.

    Args:
        process: name of this process, where an endpoint shows the waits of several.
    """
    with _lock:
        waits = sorted(_waits.values(), key=lambda wait: wait.began)
    kinds: dict[tuple[str, str, bool], list[Wait]] = {}
    for wait in waits:
        kinds.setdefault((wait.what, wait.on, wait.is_idle), []).append(wait)
    now, own = time.monotonic(), f"{process or 'process'} {os.getpid()}"
    return [_describe(same[0], len(same), now, own) for same in kinds.values()]


def _describe(wait: Wait, count: int, now: float, process: str) -> dict[str, Any]:
    left = None if wait.limit_s is None else round(wait.renewed + wait.limit_s - now, 1)
    return {
        "what": wait.what,
        "on": wait.on,
        "detail": wait.detail,
        "since": datetime.fromtimestamp(wait.since, UTC).isoformat(timespec="seconds"),
        "waited_s": round(now - wait.began, 1),
        "gives_up_in_s": left,
        "why_unlimited": wait.why_unlimited,
        "idle": wait.is_idle,
        "count": count,
        "process": process,
    }
