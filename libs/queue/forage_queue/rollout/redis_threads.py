"""Threads for calls of Redis, in a pool for each kind of work: what fills one of them holds up nothing in another.

The default pool of asyncio has a few threads, by the number of CPUs. Were groups written there, with a file each, a
sign of life would wait behind them, and the worker would count as dead.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNS = ThreadPoolExecutor(2, "signs-of-life")
_WRITES = ThreadPoolExecutor(16, "group-writes")
_CONTROL = ThreadPoolExecutor(32, "redis-calls")
_POOLS = {
    **dict.fromkeys(("keep_alive", "declare_environments", "acknowledge_policy", "declare_dtype"), _SIGNS),
    **dict.fromkeys(("finish", "reject"), _WRITES),
}
"""Function of the stream client → the pool for it; the others look and claim, and wait for something, many of them."""


async def call_in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function of the stream client in a thread of the pool for it; as `asyncio.to_thread`."""
    context = contextvars.copy_context()
    threads = _POOLS.get(function.__name__, _CONTROL)
    return await asyncio.get_running_loop().run_in_executor(threads, lambda: context.run(function, *args))
