"""The `forage` command in this process: what it prints, and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from forage_cli.main import main


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


RunForage = Callable[..., Ended]


@pytest.fixture
def run_forage(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunForage:
    """`run_forage("config", "show")`"""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["forage", *arguments])
        capfd.readouterr()
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code or 0
        assert isinstance(code, int)
        return Ended(code, *capfd.readouterr())

    return run
