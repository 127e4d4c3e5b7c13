"""Ports of loopback that no other test can take before its server listens.

They are below the ports that the kernel gives to outgoing connections, and a lock keeps each for the process that
found it, until that process ends: several pytest processes run at once.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

FIRST, LAST = 10_000, 32_000
"""The range; kernels give outgoing connections 32768 and above."""
_LOCKS = Path(tempfile.gettempdir()) / f"forage-test-ports-{os.getuid()}"
_held: list[int] = []


def reserve_ports(count: int = 1) -> int:
    """The first of `count` consecutive free ports, which are this process's until it ends.

    Raises:
        OSError: no such range is free.
    """
    starts = range(FIRST, LAST, count)
    first = random.SystemRandom().randrange(len(starts))  # a port is seldom found again soon: it may linger
    for index in range(len(starts)):
        start = starts[(first + index) % len(starts)]
        if _lock(range(start, start + count)):
            return start
    raise OSError(f"no {count} consecutive ports of loopback are free between {FIRST} and {LAST}")


def _lock(ports: range) -> bool:
    _LOCKS.mkdir(mode=0o700, exist_ok=True)
    locks: list[int] = []
    for port in ports:
        lock = os.open(_LOCKS / str(port), os.O_RDWR | os.O_CREAT, 0o600)
        locks.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            for opened in locks:
                os.close(opened)
            return False
    _held.extend(locks)
    return True
