"""Random models, a dispatcher at work, a retriever that fails as told, a collector of traces, services as processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from char_codec import char_codec
from dispatcher_bench import bench, server
from engine_fixtures import make_model
from faulty_services import codec, faulty_retriever, make_parts
from loop_clock import loop_clock
from otlp_receiver import Receiver, trace_process
from service_process import start_service, wait_until_ready

__all__ = [
    "bench",
    "char_codec",
    "codec",
    "faulty_retriever",
    "loop_clock",
    "make_model",
    "make_parts",
    "server",
    "start_service",
    "wait_until_ready",
]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A collector; this process traces, as the rollout service."""
    with trace_process("rollout") as otlp:
        yield otlp
