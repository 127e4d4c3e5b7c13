"""Real Redis-compatible servers of one test, with options of its own."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@contextlib.contextmanager
def serve(
    binary: str, folder: Path, port: str, *options: str, before: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A server on a loopback port that answers, even if only with an error. It ends with the block.

    Args:
        before: arguments that must be the first: a file with settings, the server's mode.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [binary, *before, "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen([*command, "--logfile", str(folder / "log"), *options]) as server:
        try:
            _wait_until_reachable(port)
            yield server
        finally:
            server.kill()


def _wait_until_reachable(port: str) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            redis.Redis(port=int(port), retry=Retry(NoBackoff(), 0)).ping()
            return
        except redis.AuthenticationError:
            return
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
