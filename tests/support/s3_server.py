"""A real server of the S3 protocol on loopback, in a process of its own: moto's, of the trainer's environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUCKET = "policies"


@contextlib.contextmanager
def serve_s3(port: str, log: Path, authenticate: bool = False) -> Iterator[dict[str, str]]:
    """Run the server; yields the environment of a process that uses it. It ends with the block.

    Args:
        authenticate: only known credentials are accepted, and there are none.
    """
    python, url = REPOSITORY / ".venvs/trainer/bin/python", f"http://127.0.0.1:{port}"
    # One request is not checked: the one that creates the bucket.
    environment = os.environ | ({"INITIAL_NO_AUTH_ACTION_COUNT": "1"} if authenticate else {})
    with log.open("wb") as output:
        command = [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        _create_bucket(server, f"{url}/{BUCKET}")
        yield {
            "AWS_ENDPOINT_URL_S3": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def _create_bucket(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=30):
                return
        except urllib.error.URLError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # wait: for the server's start
