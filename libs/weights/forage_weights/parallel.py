"""Work in several threads: reading, hashing, decompressing and NumPy's loops let other threads run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_parallel(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Apply a function to every item; results in the order of the items.

    The first error is raised once the calls that run have ended; the others are not begun.
    """
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="policies") as pool:
        try:
            return list(pool.map(work, items))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
