"""A console for texts of others; apart from `terminal`, whose users need not wait for rich."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from forage_runtime.text.terminal import printable


class TextConsole(Console):
    """A console for texts of others: markup in them is text, and so are their escapes, wherever they stand."""

    def __init__(self, **options: Any) -> None:
        """
        Args:
            options: of rich's console.
        """
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            yield segment if segment.control else segment._replace(text=printable(text))
