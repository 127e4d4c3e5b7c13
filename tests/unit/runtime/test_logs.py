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
