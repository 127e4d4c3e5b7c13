"""Tables for a terminal, without lines."""

from __future__ import annotations

from rich.table import Table


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number for a cell; a dash where it is not known."""
    return "–" if value is None else f"{value:.{digits}f}"


def make_table(*columns: str, left: int = 1, title: str = "") -> Table:
    """Make a table. left: number of left-aligned columns; the others are right-aligned."""
    table = Table(title=title or None, box=None, header_style="dim", title_justify="left", title_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right")
    return table
