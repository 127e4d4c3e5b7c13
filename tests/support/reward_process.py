"""A reward service as a process, as its contract tests see it."""

from __future__ import annotations

import ssl
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from forage_common.v1 import reward_pb2_grpc


@dataclass(frozen=True)
class Service:
    """A running service; `log` is the file of its standard error."""

    process: Any
    address: str
    health_address: str
    log: Path
    ca: Path | None = None
    """The authority of its certificate; None: it speaks no TLS."""

    @property
    def channel(self) -> grpc.Channel:
        """A new connection."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 2**28)]
        return grpc.insecure_channel(self.address, options=options)

    def open_stub(self) -> reward_pb2_grpc.RewardStub:
        return reward_pb2_grpc.RewardStub(self.channel)

    def read_metrics(self) -> str:
        with self._get("/metrics", 20) as page:
            text: str = page.read().decode()
        return text

    def read_metric(self, name: str) -> float:
        """The sum over all label sets that begin with `name`."""
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.read_metrics().splitlines() if line.startswith(name))

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the service ended: {self.log.read_text()}"
            try:
                with self._get("/readyz", 5):
                    return
            except OSError:
                time.sleep(0.05)
        pytest.fail("the service is not ready after 120 s")

    def _get(self, path: str, timeout_s: float) -> Any:
        scheme, context = ("https", ssl.create_default_context(cafile=self.ca)) if self.ca else ("http", None)
        return urllib.request.urlopen(f"{scheme}://{self.health_address}{path}", timeout=timeout_s, context=context)


def wait_for(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.05)
