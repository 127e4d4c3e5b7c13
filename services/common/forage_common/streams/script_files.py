"""The Lua scripts of the streams."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def read_script(name: str) -> str:
    """Read a Lua script; those of the trainer include the check of its epoch."""
    folder = resources.files("forage_common.streams") / "scripts"
    fence = (folder / "fence.lua").read_text()
    return (folder / f"{name}.lua").read_text().replace("--@fence\n", fence)
