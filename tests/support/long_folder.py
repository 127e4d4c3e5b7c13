"""A folder of temporary files with a long path, as SLURM and macOS have: no path of a socket fits into it."""

from __future__ import annotations

from pathlib import Path


def make_long_folder(parent: Path) -> str:
    """Make one, for TMPDIR."""
    folder = parent / ("d" * 90)
    folder.mkdir()
    return str(folder)
