"""A progress bar with the time left, for commands that work through many items."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")


@contextmanager
def show_progress(console: Console, description: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Show a bar until the block ends; yields the function to call after each item.

    Args:
        total: number of items; None: not known.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


async def consume_results(
    results: AsyncGenerator[T, None], keep: Callable[[T], object], console: Console, description: str, total: int
) -> None:
    """Pass each result to `keep` as it arrives, and show a bar."""
    with show_progress(console, description, total) as advance:
        async with aclosing(results):
            async for result in results:
                keep(result)
                advance()
