"""Waits of tests: for what must happen, never for a time that should be enough."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from limits import WAIT_S

__all__ = ["WAIT_S", "wait_until", "wait_until_async"]
T = TypeVar("T")

_POLL_S = 0.02


def wait_until(condition: Callable[[], T], explain: Callable[[], object] | str = "", limit_s: float = WAIT_S) -> T:
    """Call a condition until it is true, and return what it returned.

    Args:
        explain: what to say if it does not happen: a text, or a function that is called then.
        limit_s: at least a minute.

    Raises:
        AssertionError: `limit_s` are over.
    """
    deadline = time.monotonic() + limit_s
    while not (result := condition()):
        assert time.monotonic() < deadline, _describe(condition, explain, limit_s)
        time.sleep(_POLL_S)
    return result


async def wait_until_async(
    condition: Callable[[], T], explain: Callable[[], object] | str = "", limit_s: float = WAIT_S
) -> T:
    """`wait_until` that lets the event loop go on."""
    deadline = time.monotonic() + limit_s
    while not (result := condition()):
        assert time.monotonic() < deadline, _describe(condition, explain, limit_s)
        await asyncio.sleep(_POLL_S)
    return result


def _describe(condition: Callable[[], object], explain: Callable[[], object] | str, limit_s: float) -> str:
    said = explain() if callable(explain) else explain
    return f"{said or condition} did not happen in {limit_s:.0f} s"
