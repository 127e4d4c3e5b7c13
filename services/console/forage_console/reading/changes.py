"""Streams of what changes in runs: one task for each run looks at its files, however many pages listen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Annotated

from fastapi import Depends, Request
from upath import UPath

from forage_console.errors import NotFoundError
from forage_console.models.runs import Progress, RunChange, RunState
from forage_console.reading.detail import list_steps, read_events
from forage_console.reading.files import Cached, list_names, read_stamp
from forage_console.reading.reader import Readers, ReadersOf
from forage_console.reading.validations import FOLDER
from forage_runtime.telemetry.logs import get_logger

INTERVAL_S = 0.7
_REMOTE_INTERVAL_S = 5.0
_PARTS = ("trajectories", FOLDER, "checkpoints", "events.jsonl")
_GONE = Progress(phase="gone", detail="the folder of the run was deleted", done=0, total=0, left_s=None)

Changes = Mapping[str, RunChange]
"""Run → its state."""


class Watch:
    """Looks for changes again and again while somebody listens."""

    def __init__(self, look: Callable[[], Changes], interval_s: float) -> None:
        """
        Args:
            look: reads the state of the runs that are watched; called in a thread, one call at a time.
        """
        self._look = look
        self._interval_s = interval_s
        self._listeners: set[asyncio.Queue[RunChange]] = set()
        self._seen: dict[str, RunChange] = {}
        self._task: asyncio.Task[None] | None = None

    async def listen(self) -> AsyncGenerator[RunChange, None]:
        """Yield the state of every run, then each that has changed; a run that is gone once more."""
        queue: asyncio.Queue[RunChange] = asyncio.Queue()
        for change in self._seen.values():
            queue.put_nowait(change)
        self._listeners.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="watch runs")
        try:
            while True:
                yield await queue.get()  # wait: for the next change of a run
        finally:
            self._listeners.discard(queue)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None
                self._seen.clear()

    async def _run(self) -> None:
        while True:
            try:
                found = await asyncio.to_thread(self._look)
            except Exception as error:  # noqa: BLE001 - pages wait for this task, also after a moment without the disk
                get_logger().warning("runs_not_read", reason=str(error))
                found = self._seen
            changed = [change for run, change in found.items() if self._seen.get(run) != change]
            gone = [
                change.model_copy(update={"state": RunState.BROKEN, "progress": _GONE})
                for run, change in self._seen.items()
                if run not in found
            ]
            self._seen = dict(found)
            for change in (*changed, *gone):
                for queue in self._listeners:
                    queue.put_nowait(change)
            await asyncio.sleep(self._interval_s)  # wait: pause between two looks at the files


class Watches:
    """The watches of an application: one for each run that is listened to, and one for all."""

    def __init__(self, readers: Readers, runs: UPath) -> None:
        self._readers = readers
        self._runs = runs
        self._interval_s = INTERVAL_S if read_stamp(runs)[2] else _REMOTE_INTERVAL_S
        self._watches: dict[str, Watch] = {}
        self._parts: dict[str, Cached[tuple[int, int, int]]] = {}

    async def watch_run(self, run: str) -> AsyncGenerator[RunChange, None]:
        """Yield the state of a run now, and whenever it has changed; ends when the run is deleted."""
        if run not in self._watches:
            self._watches[run] = Watch(lambda: self._look_at([run]), self._interval_s)
        async with aclosing(self._watches[run].listen()) as changes:
            async for change in changes:
                yield change
                if change.progress.phase == _GONE.phase:
                    return

    async def watch_all(self) -> AsyncGenerator[RunChange, None]:
        """Yield the state of every run now, and whenever one has changed."""
        if "" not in self._watches:
            self._watches[""] = Watch(lambda: self._look_at(self._readers.summaries.list_runs()), self._interval_s)
        async with aclosing(self._watches[""].listen()) as changes:
            async for change in changes:
                yield change

    def _look_at(self, runs: list[str]) -> dict[str, RunChange]:
        found = {}
        for run in runs:
            try:
                row = self._readers.read_row(run)
            except NotFoundError:
                self._parts.pop(run, None)
                continue
            saved_steps, validations, marks = self._count_parts(self._runs / run)
            found[run] = RunChange(
                run=row.id,
                state=row.state,
                progress=row.progress,
                step=row.step,
                saved_steps=saved_steps,
                validations=validations,
                marks=marks,
            )
        return found

    def _count_parts(self, folder: UPath) -> tuple[int, int, int]:
        """Count saved steps, validations and marks; again where a folder has another file."""
        stamps = tuple(read_stamp(folder / name) for name in _PARTS)
        if not read_stamp(folder)[2]:  # an object store, whose folders have no times
            return _count(folder)
        return self._parts.setdefault(folder.name, Cached(lambda: _count(folder))).get(stamps)


def _count(folder: UPath) -> tuple[int, int, int]:
    checkpoints = [name for name in list_names(folder / "checkpoints") if name.startswith("step_")]
    validations = list_names(folder / FOLDER, ".json")
    return len(list_steps(folder)), len(validations), len(read_events(folder)) + len(checkpoints)


def _find(request: Request, readers: ReadersOf) -> Watches:
    state = request.app.state
    if not hasattr(state, "watches"):
        state.watches = Watches(readers, state.console.runs)
    watches: Watches = state.watches
    return watches


WatchesOf = Annotated[Watches, Depends(_find)]
