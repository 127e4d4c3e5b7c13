"""Lines of the log: whole, whoever else writes to the same stream."""

import io
import json
import logging
import sys

import pytest
import structlog

from forage_runtime.telemetry.logs import configure_logs, get_logger


class RecordedWrites(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_every_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of another thread cannot fall into the middle of one that is written at once."""
    stream = RecordedWrites()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    try:
        configure_logs("retriever")
        get_logger().info("reloading", what="reading the corpus\nof two lines")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    assert [json.loads(line)["event"] for line in stream.writes] == ["reloading", "Invalid HTTP request received."]
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in stream.writes)


def test_a_command_logs_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    structlog.reset_defaults()
    stream = io.StringIO()
    try:
        log = get_logger()
        monkeypatch.setattr(sys, "stderr", stream)  # as a live view does while it runs
        log.warning("service_died", name="rollout", reason="no engine\nat redis://u:secret@h/0 \x1b[31m", code=1)
        log.info("ready")
    finally:
        structlog.reset_defaults()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("warning: service_died: no engine at redis://")
    assert first.endswith("(name=rollout, code=1)")
    assert "secret" not in first
    assert "\x1b" not in first
    assert second == "info: ready"
