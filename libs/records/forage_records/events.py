"""What happened in a run besides its steps: `<run>/events.jsonl`, one JSON object a line, appended and never changed.

Several processes write it: the trainer, and what restarts services. A view shows events as marks on curves. Steps that
a later trainer takes again keep their events, since they did happen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from forage_records.json_text import parse_json
from forage_runtime.errors import DiskFullError
from forage_runtime.files import durable
from forage_runtime.telemetry.logs import get_logger

FILE = "events.jsonl"


class EventKind(StrEnum):
    """What happened.

    START, RESUME: the trainer began, from nothing or from a checkpoint. CHECKPOINT: one is durable. VALIDATION, WATCH:
    a result is written. GUARD: a step tripped one. ROLLBACK: the run goes back to its newest checkpoint. SKIP: a step
    trained on nothing, because of an earlier rollback. RESTART: a service died and is started again. STOP, FAILURE,
    END: the trainer was asked to stop, gave up, or is done; FAILURE of another service: it is not started again.
    """

    START = "start"
    RESUME = "resume"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    WATCH = "watch"
    GUARD = "guard"
    ROLLBACK = "rollback"
    SKIP = "skip"
    RESTART = "restart"
    STOP = "stop"
    FAILURE = "failure"
    END = "end"


@dataclass(frozen=True)
class Event:
    """One line of the file.

    Attributes:
        time: Unix time in seconds.
        kind: an `EventKind`; a later version may write others.
        text: one sentence, or a part of one.
        step: the step or policy version that it belongs to; None of another service.
        service: that it happened to.
    """

    time: float
    kind: str
    text: str
    step: int | None = None
    service: str = "trainer"


class EventLog:
    """Appends to the events of a run. An event that cannot be written is logged and does not hold up the run."""

    def __init__(self, run: Path) -> None:
        self._file = run / FILE

    def append(self, kind: EventKind, text: str, step: int | None = None, service: str = "trainer") -> None:
        """Append an event of this moment."""
        event = Event(time.time(), kind, text, step, service)
        try:
            durable.append(self._file, (json.dumps(asdict(event)) + "\n").encode())
        except (DiskFullError, OSError) as error:
            get_logger().warning("event_not_written", kind=kind, text=text, reason=str(error))


def parse_events(text: str) -> Iterator[Event]:
    """Parse the lines of the file; one that is damaged, or still being written, is left out."""
    for line in text.split("\n"):  # U+2028 and the like are characters of a text
        try:
            row = parse_json(line)
            step = row.get("step")
            yield Event(
                float(row["time"]),
                str(row["kind"]),
                str(row["text"]),
                None if step is None else int(step),
                str(row.get("service", "trainer")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue


def read_events(run: Path) -> list[Event]:
    """Read the events of a run, the oldest first; none where there is no file, as in runs of before."""
    try:
        return list(parse_events((run / FILE).read_bytes().decode(errors="replace")))
    except FileNotFoundError:
        return []
