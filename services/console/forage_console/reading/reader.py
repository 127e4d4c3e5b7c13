"""What is kept in memory of the runs that pages have asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Annotated

from fastapi import Depends, Request
from upath import UPath

from forage_console.context import Console
from forage_console.models.runs import RunRow
from forage_console.reading.files import Stamp
from forage_console.reading.metrics import StepMetrics
from forage_console.reading.summaries import Summaries, Summary
from forage_console.reading.validations import FOLDER, Validation, ValidationQuestion, list_labels, stamp_label
from forage_records.run_settings import RunSettings

_KEPT = 16


class RunReader:
    """One run, read again where its files have changed. Hold `lock` while using what it returns.

    Attributes:
        questions: uid → question, of all validations that were read.
    """

    def __init__(self, folder: UPath, summary: Summary) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.questions: dict[str, ValidationQuestion] = {}
        self._summary = summary
        self._metrics = StepMetrics(folder / "metrics.jsonl")
        self._validations: dict[str, tuple[tuple[Stamp, ...], Validation]] = {}

    @property
    def settings(self) -> RunSettings:
        return self._summary.settings

    @property
    def metrics(self) -> StepMetrics:
        self._metrics.refresh()
        return self._metrics

    def list_labels(self) -> list[str]:
        """List the labels of validations, in order of steps."""
        return list_labels(self.folder)

    def read_validation(self, label: str) -> Validation:
        """Read a validation, which may be damaged or empty."""
        stamps = stamp_label(self.folder, label)
        if label not in self._validations or self._validations[label][0] != stamps:
            self._validations[label] = (stamps, Validation(self.folder / FOLDER, label, self.questions))
        return self._validations[label][1]

    def read_validations(self) -> list[Validation]:
        """Read all validations, in order of steps."""
        labels = self.list_labels()
        for gone in self._validations.keys() - set(labels):
            del self._validations[gone]
        found = [self.read_validation(label) for label in labels]
        return sorted(found, key=lambda one: (one.step, one.label != "before", one.is_watch))


class Readers:
    """The runs that were asked for last. Thread-safe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._lock = threading.Lock()
        self.summaries = Summaries(console.runs)

    def open(self, run: str) -> RunReader:
        """Open a run.

        Raises:
            NotFoundError: there is none of that name.
        """
        folder = self._console.find_run(run)
        with self._lock:
            if folder.name not in self._readers:
                self._readers[folder.name] = RunReader(folder, self.summaries.get(folder))
            self._readers.move_to_end(folder.name)
            while len(self._readers) > _KEPT:
                self._readers.popitem(last=False)
            return self._readers[folder.name]

    def read_row(self, run: str) -> RunRow:
        """Read a run's row of the list.

        Raises:
            NotFoundError: there is none of that name.
        """
        return self.summaries.read_row(self._console.find_run(run))


def _find(request: Request) -> Readers:
    """The readers of an application; made at the first request."""
    state = request.app.state
    with _MAKING:
        if not hasattr(state, "readers"):
            state.readers = Readers(state.console)
    readers: Readers = state.readers
    return readers


_MAKING = threading.Lock()
ReadersOf = Annotated[Readers, Depends(_find)]
