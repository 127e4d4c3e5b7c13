"""Names of the dispatchers of a service, each of which one living process has, and its successor after it."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from forage_runtime.settings import Settings


class WorkerName:
    """The first free name of this service on this host, taken until the process ends, however it ends.

    The dispatchers of a service on a host number themselves by locks, which the system opens when a process has ended.
    So a dispatcher that is started anew takes the lowest number that is free: that of the one that has ended, whose
    prompts it takes over at once. A name that nobody takes again, as after the loss of a node, keeps no prompts: they
    are reclaimed after `redis.reclaim_idle_s`.

    Attributes:
        text: the name. Two services of one run differ in host or address; where they do not, work is only done twice.
    """

    def __init__(self, settings: Settings) -> None:
        service = f"rollout-{socket.gethostname()}-{settings.rollout.grpc_address}"
        number, self._lock = _take_number(f"{settings.run.id}\n{service}")
        self.text = f"{service}-{number}" if number else service

    def release(self) -> None:
        """Let another dispatcher have the name; the end of the process does the same."""
        self._lock.close()


def _take_number(service: str) -> tuple[int, IO[bytes]]:
    """The lowest number whose lock is free, and the lock."""
    digest = hashlib.sha256(service.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"forage-dispatchers-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in itertools.count():
        lock = (folder / str(number)).open("ab")
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number, lock
        lock.close()
    raise AssertionError("unreachable: numbers do not end")
