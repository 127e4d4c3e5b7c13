"""What every route needs: the folder of runs and the settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from upath import UPath

from forage_console.errors import NotFoundError
from forage_runtime.settings import Settings

_MAX_NAME_BYTES = 255
"""Of a file or folder, on the file systems of Linux."""
_SHOWN = ("", "trajectories", "validation", "logs")
_HEAVY = frozenset({"checkpoints", "policies", "redis", "history"})
"""Folders that may lie on another disk: no page shows what is in their files."""


@dataclass(frozen=True)
class Console:
    """The state of the service.

    Attributes:
        runs: folder of all runs, at a local path or an fsspec address.
    """

    runs: UPath
    settings: Settings

    def find_run(self, run: str) -> UPath:
        """Return the folder of a run, which may be named by a link such as `latest`; never one outside `runs`.

        Raises:
            NotFoundError: there is none of that name.
        """
        folder = self.runs / run if is_run_name(run) else None
        if folder is None or not folder.is_dir():
            raise NotFoundError(f"there is no run '{run[:100]}' in {self.runs}: the page Runs lists those that exist")
        if isinstance(folder, Path):
            real, outer = folder.resolve(), self.runs.resolve()
            if real.parent != outer:
                raise NotFoundError(f"run '{run}' links out of {self.runs}: open the console on the folder it is in")
            if link := find_foreign_link(real):
                raise NotFoundError(f"run '{run}' has a link out of its folder ({link}): copy in what it links to")
            return self.runs / real.name
        return folder


def find_foreign_link(folder: Path) -> str:
    """The name of a file that pages would show, and that is a link out of the folder of its run; "" without one."""
    for part in _SHOWN:
        try:
            links = [entry.name for entry in os.scandir(folder / part) if entry.is_symlink()]
        except OSError:
            continue  # a run need not have it
        for name in links:
            if name not in _HEAVY and not _is_within(folder / part / name, folder):
                return f"{part}/{name}".lstrip("/")
    return ""


def _is_within(link: Path, folder: Path) -> bool:
    try:
        return link.resolve().is_relative_to(folder)
    except RuntimeError:  # links that lead to each other have no content of anywhere
        return True


def is_run_name(name: str) -> bool:
    """Whether a text can be the name of a run's folder: one part of a path, not hidden, and in UTF-8."""
    if not name or name.startswith(".") or any(char in name for char in "/\\\0"):
        return False
    return is_text(name) and len(name.encode()) <= _MAX_NAME_BYTES


def is_text(name: str) -> bool:
    """Whether the name of a file is text: Python has stand-ins for bytes that are none, which no reply can hold."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _find(request: Request) -> Console:
    console: Console = request.app.state.console
    return console


ConsoleOf = Annotated[Console, Depends(_find)]


def _find_folder(run: str, console: ConsoleOf) -> UPath:
    return console.find_run(run)


FolderOf = Annotated[UPath, Depends(_find_folder)]
"""The folder of the run that the path names; a reply of 404 where there is none, before a stream begins."""
