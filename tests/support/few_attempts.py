"""Calls to other services that fail after two attempts, whatever their time limit is."""

from __future__ import annotations

import pytest

from forage_runtime.clients import calls

HOUR_S = 3600.0


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat a failed call once and at once; the next pause would be longer than any limit, so that it fails."""
    monkeypatch.setattr(calls, "_jitter", lambda state: 0.0 if state.attempt_number == 1 else HOUR_S)
