"""Tables of examples, and a tokenizer of characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from char_codec import char_codec
from loop_clock import loop_clock

__all__ = ["char_codec", "loop_clock"]
DATA = Path(__file__).resolve().parents[2] / "data" / "rollout"


def load_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument named `<file>_row` runs once a row of that data file."""
    for argument in metafunc.fixturenames:
        if argument.endswith("_row"):
            table = load_rows(argument.removesuffix("_row"))
            metafunc.parametrize(argument, table, ids=[str(number) for number in range(len(table))])
