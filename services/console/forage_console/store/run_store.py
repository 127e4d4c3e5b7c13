"""What is known of a run's trajectories, kept up with its files by threads in the background."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from upath import UPath

from forage_console.errors import NotFoundError
from forage_console.store.files import DataFile, list_files
from forage_console.store.table import Database, Table
from forage_console.store.texts import Phrase, TextIndex, scan
from forage_console.store.values import SCHEMA, read_values
from forage_runtime.errors import ForageError
from forage_runtime.telemetry.logs import get_logger

LIST_S = 1.0
"""A folder is listed again after so long."""
WAIT_S = 0.6
"""A request waits so long for files that are not in the table yet, and then answers without them."""
_ANSWERS = 3
"""Searches whose answers are kept, while nothing is indexed."""
UNREADABLE = (
    *(OSError, pa.ArrowException, ForageError, ValueError, LookupError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)
"""What a file that is gone, damaged or foreign raises."""


class RunStore:
    """The trajectories of one run: a table of their values and an index of their texts.

    Attributes:
        table, texts: what queries read.
    """

    def __init__(self, run: UPath, database: Database, folder: Path) -> None:
        """
        Args:
            folder: for table and index.
        """
        self.run = run
        self.name = run.name
        self.table: Table = database.open_table(folder / "values.duckdb")
        self.texts = TextIndex(folder / "texts.sqlite")
        self.files: dict[str, DataFile] = {}
        self._listed = float("-inf")
        self._keys = self.table.list_keys()
        self._skipped: set[int] = set()
        self._answers: dict[tuple[object, ...], pa.Table] = {}
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._threads: dict[str, threading.Thread] = {}

    def refresh(self) -> None:
        """Look for changes of the run's files, and wait a moment until the table has them."""
        with self._changed:
            is_due = time.monotonic() - self._listed >= LIST_S
            if is_due:
                self._listed = time.monotonic()
        if is_due:
            try:
                files = {file.place: file for file in list_files(self.run)}
            except BaseException:
                self._listed = float("-inf")  # the next request asks again, and gets the same answer
                raise
            with self._writing:
                if {file.key for file in files.values()} != self._keys:
                    self._keys -= self.table.keep(file.key for file in files.values())
                self.files = files
            self._start("values", self._load_missing)
            self._start("texts", self._index_missing)
        with self._changed:  # wait: a moment, and then what is there is the answer
            self._changed.wait_for(lambda: not self._list_missing(self._keys), WAIT_S)

    def require(self, place: str) -> DataFile:
        """Return the file of a place, which the table has from now on.

        Raises:
            NotFoundError: there is none, or it cannot be read.
        """
        file = self.files.get(place)
        if file is None:
            self._listed = float("-inf")
            self.refresh()
            file = self.files.get(place)
        if file is None:
            kept = ", ".join(list(self.files)[:5]) or "none"
            raise NotFoundError(f"there is no '{place[:100]}' in {self.run.name}: its trajectories are in {kept}")
        self._load(file)
        problems = self.table.query("SELECT problem FROM {table}.files WHERE key = ?", [file.key])
        if problems and problems[0][0]:
            raise NotFoundError(f"{place} cannot be read ({problems[0][0]}): it is damaged or still being written")
        return file

    def find_matches(self, phrases: Sequence[Phrase], places: Iterable[str]) -> pa.Table:
        """Find the trajectories that contain every phrase: a table with their ids.

        Args:
            places: where to look in files that the index does not have yet.
        """
        wanted = set(places)
        missing = self._list_unindexed(wanted)  # before the index is asked, which grows meanwhile
        question = (tuple(phrases), len(self.texts.done), tuple(file.key for file in missing))
        if (known := self._answers.get(question)) is not None:  # of another page of the list
            return known
        try:
            found = self.texts.find(phrases)
        except sqlite3.Error as error:  # somebody deleted the cache, or its disk fails
            get_logger().warning("text_index_lost", run=self.run.name, reason=str(error))
            with suppress(sqlite3.Error, OSError):
                self.texts.start_over()
            found, missing = np.empty(0, np.int64), self._list_unindexed(wanted)
        scanned: list[int] = []
        for file in missing:
            with suppress(*UNREADABLE):
                scanned += [file.identify(row) for row in scan(file, phrases)]
        ids = np.concatenate([found, np.array(scanned, dtype=np.int64)])
        answer = pa.table({"id": pa.array(ids, pa.int64())})
        self._answers = dict(list(self._answers.items())[-_ANSWERS:]) | {question: answer}
        return answer

    def measure_indexed(self) -> float:
        """The share of the files that the index has."""
        missing = [file for file in self._list_missing(self.texts.done) if file.key not in self._skipped]
        return 1 - len(missing) / len(self.files) if self.files else 1.0

    def measure_loaded(self) -> float:
        """The share of the files that the table has."""
        return 1 - len(self._list_missing(self._keys)) / len(self.files) if self.files else 1.0

    def close(self) -> None:
        """Stop the threads."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        for thread in list(self._threads.values()):
            thread.join()

    def _list_missing(self, keys: set[int]) -> list[DataFile]:
        return [file for file in list(self.files.values()) if file.key not in keys]

    def _list_unindexed(self, places: set[str]) -> list[DataFile]:
        """List the files of some places that the table has and the index has not."""
        missing = self._list_missing(self.texts.done)
        return [file for file in missing if file.place in places and file.key in self._keys]

    def _start(self, name: str, work: Callable[[], None]) -> None:
        with self._changed:
            thread = self._threads.get(name)
            if thread is None or not thread.is_alive():
                self._threads[name] = threading.Thread(target=work, name=f"{name}-{self.run.name}", daemon=True)
                self._threads[name].start()

    def _load_missing(self) -> None:
        while not self._stop.is_set() and (missing := self._list_missing(self._keys)):
            self._load(missing[0])

    def _load(self, file: DataFile) -> None:
        with self._writing:
            if file.key in self._keys:
                return
            values, problem = SCHEMA.empty_table(), None
            try:
                values = read_values(file)
            except UNREADABLE as error:
                problem = " ".join(str(error).split())[:200] or type(error).__name__
                get_logger().warning("trajectories_unreadable", file=str(file.path), reason=problem)
            try:
                self.table.add(file, values, problem)
            except duckdb.Error as error:
                get_logger().error("table_not_changed", run=self.run.name, reason=str(error)[:200])
        with self._changed:
            self._keys.add(file.key)
            self._changed.notify_all()

    def _wait_for_table(self) -> bool:
        """Whether the table has every file: it comes before the index, because every page needs it."""
        with self._changed:  # wait: until the other thread has read more, or the store closes
            self._changed.wait_for(lambda: self._stop.is_set() or not self._list_missing(self._keys), LIST_S)
            return not self._list_missing(self._keys)

    def _index_missing(self) -> None:
        with suppress(OSError, AttributeError):  # elsewhere than on Linux threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        if self.texts.is_stale(list(self.files.values())):
            self.texts.start_over()
        while not self._stop.is_set():
            missing = [file for file in self._list_missing(self.texts.done) if file.key not in self._skipped]
            if not missing:
                return
            if not self._wait_for_table():
                continue
            try:
                self.texts.add(missing[0], self._stop)
            except sqlite3.Error as error:
                get_logger().warning("text_index_not_changed", run=self.run.name, reason=str(error))
                return
            except UNREADABLE:
                self._skipped.add(missing[0].key)
