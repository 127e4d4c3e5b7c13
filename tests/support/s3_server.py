"""A real server of the S3 protocol on loopback, in a process of its own: moto's, of the trainer's environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUCKET = "policies"
_START_S, _ANSWER_S = 120.0, 60.0


class S3Server:
    """The server, which keeps its objects in memory: what it held is gone when it is started again.

    Args:
        authenticate: only known credentials are accepted, and there are none.

    Attributes:
        process: while it runs, or after it was killed.
    """

    def __init__(self, port: str, log: Path, authenticate: bool = False) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._command = [str(REPOSITORY / ".venvs/trainer/bin/python"), "-m", "moto.server"]
        self._command += ["-H", "127.0.0.1", "-p", port]
        self._log = log
        # One request is not checked: the one that creates the bucket.
        self._environment = os.environ | ({"INITIAL_NO_AUTH_ACTION_COUNT": "1"} if authenticate else {})
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use the server."""
        return {
            "AWS_ENDPOINT_URL_S3": self._url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start it; `create_bucket` must follow."""
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=output, stderr=output)

    def create_bucket(self) -> bool:
        """Create the bucket, if it does not exist; False while the server does not answer."""
        request = urllib.request.Request(f"{self._url}/{BUCKET}", method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S):
                return True
        except OSError:
            return False

    def reset(self) -> None:
        """Forget everything; `create_bucket` must follow."""
        request = urllib.request.Request(f"{self._url}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=_ANSWER_S).close()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def await_bucket(server: S3Server) -> None:
    """Return once a server that was started has its bucket.

    Raises:
        ConnectionError: it has ended, or does not answer in time.
    """
    deadline = time.monotonic() + _START_S
    while not server.create_bucket():
        if server.process is None or server.process.poll() is not None or time.monotonic() > deadline:
            raise ConnectionError("the S3 server did not start: see its log")
        time.sleep(0.1)  # wait: for the server's start


@contextlib.contextmanager
def serve_s3(port: str, log: Path, authenticate: bool = False) -> Iterator[dict[str, str]]:
    """Run the server; yields the environment of a process that uses it. It ends with the block.

    Args:
        authenticate: as of `S3Server`.
    """
    server = S3Server(port, log, authenticate)
    server.start()
    try:
        await_bucket(server)
        yield server.environment
    finally:
        server.kill()
