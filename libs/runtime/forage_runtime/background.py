"""Background tasks whose unexpected end is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from forage_runtime.telemetry.logs import get_logger


def supervise(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a background task whose unexpected end is logged; the caller must keep the reference."""
    task = asyncio.create_task(work, name=name)

    def log_failure(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            get_logger().error("task_failed", task=name, exc_info=done.exception())

    task.add_done_callback(log_failure)
    return task
