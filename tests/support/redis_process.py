"""Real Redis-compatible servers of one test, with options of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from waiting import wait_until

from forage_runtime.settings import RedisSettings

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


class RedisProcess:
    """A durable server that can be killed and come back with what its file holds."""

    def __init__(self, binary: str, folder: Path, port: str) -> None:
        self.settings = RedisSettings(url=f"redis://127.0.0.1:{port}/0")
        # A blocked call ends with the next tick of the server.
        self._serve = lambda: serve(binary, folder, port, *DURABLE, "--hz", "500")
        self._folder = folder
        self._client = redis.Redis(port=int(port), retry=Retry(NoBackoff(), 0))
        self._running = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        self._running.enter_context(self._serve())

    def kill(self) -> None:
        self._running.close()

    def flush(self) -> None:
        self._client.flushall()

    def tear(self, size: int) -> None:
        """Kill the server, cut `size` bytes off its append-only file, fewer than its last record has, and start it."""
        self.kill()
        file = max(self._folder.glob("appendonlydir/*.incr.aof"), key=lambda path: path.stat().st_mtime)
        os.truncate(file, max(0, file.stat().st_size - size))
        self.start()


def _wait_until_reachable(port: str) -> None:
    with redis.Redis(port=int(port), retry=Retry(NoBackoff(), 0)) as client:
        wait_until(lambda: _answers(client), f"an answer of the server at port {port}")


def _answers(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.AuthenticationError:
        return True
    except redis.ConnectionError:
        return False
    return True
