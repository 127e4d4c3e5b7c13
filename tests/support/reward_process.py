"""A reward service as a process, as its tests see it."""

from __future__ import annotations

import signal
import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from waiting import WAIT_S, wait_until

from forage_proto.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2


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
        with self._get("/metrics", WAIT_S) as page:
            text: str = page.read().decode()
        return text

    def read_metric(self, name: str) -> float:
        """The sum over all label sets that begin with `name`."""
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.read_metrics().splitlines() if line.startswith(name))

    def wait_until_ready(self) -> None:
        wait_until(self._is_ready, f"{self.address} is ready")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the service ended: {self.log.read_text()}"
        try:
            with self._get("/readyz", WAIT_S):
                return True
        except OSError:
            return False

    def _get(self, path: str, timeout_s: float) -> Any:
        scheme, context = ("https", ssl.create_default_context(cafile=self.ca)) if self.ca else ("http", None)
        return urllib.request.urlopen(f"{scheme}://{self.health_address}{path}", timeout=timeout_s, context=context)


def build_item(number: int = 0, source: str = "nq", target: str = "Oslo") -> reward_pb2.ScoreItem:
    """A trajectory that answers "Oslo"."""
    return reward_pb2.ScoreItem(
        trajectory_id=f"t{number}",
        data_source=source,
        spans=[trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text="<answer>Oslo</answer>")],
        ground_truth=trajectory_pb2.GroundTruth(targets=[target]),
    )


def build_batch(size: int, **fields: str) -> reward_pb2.ScoreRequest:
    return reward_pb2.ScoreRequest(items=[build_item(number, **fields) for number in range(size)])


def assert_sigterm_finishes_calls(service: Service) -> None:
    """Assert that calls in flight are answered after SIGTERM, and that no process stays."""
    family = psutil.Process(service.process.pid).children(recursive=True)
    calls = [
        service.open_stub().Score.future(build_batch(1, source="user", target="hang"), timeout=WAIT_S) for _ in range(2)
    ]
    wait_until(lambda: service.read_metric("forage_reward_queue_items") == 2.0, "the calls were not queued")
    service.process.send_signal(signal.SIGTERM)
    for call in calls:
        assert call.result().items[0].score.status == trajectory_pb2.STATUS_TIMEOUT
    assert service.process.wait(timeout=WAIT_S) == 0
    assert '"event": "stopped"' in service.log.read_text()
    wait_until(lambda: not any(process.is_running() for process in family), f"{family} are still there")
