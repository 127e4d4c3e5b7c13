"""Random models, a dispatcher at work, a collector of traces, and tables of examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dispatcher_bench import bench, server
from engine_fixtures import char_codec, make_model
from otlp_receiver import Receiver, trace_process

__all__ = ["bench", "char_codec", "make_model", "server"]
DATA = Path(__file__).resolve().parents[2] / "data" / "rollout"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A collector; this process traces, as the rollout service."""
    with trace_process("rollout") as otlp:
        yield otlp


def load_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument named `<file>_row` runs once a row of that data file."""
    for argument in metafunc.fixturenames:
        if argument.endswith("_row"):
            table = load_rows(argument.removesuffix("_row"))
            metafunc.parametrize(argument, table, ids=[str(number) for number in range(len(table))])
