"""The history of a run: every operation on its streams and every load of a policy, with start, end and result.

`forage check-history` verifies a run by it, without the ledger. Each process appends JSON lines to a file of its own in
`<run folder>/history/`: one before an operation and one after it, so that what was under way when the process was
killed is known to be unknown. An operation that takes entries has one line, and none where there was nothing to take:
what it took before a kill comes back.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import LedgerEntry, Policy, Prompt, TrajectoryGroup
from forage_queue.streams.connection import count_lost_replies
from forage_runtime.errors import FencedError
from forage_runtime.settings import RunSettings
from forage_runtime.telemetry.logs import get_logger

if TYPE_CHECKING:
    from forage_trajectory.trajectory import Group

FOLDER = "history"
OK, REFUSED, UNKNOWN = "ok", "refused", "unknown"
"""Results: it happened; it did not; it may have. Any other result is the text of an error, which may have happened."""
_MOST_UNWRITTEN = 2**22
"""Bytes of lines that are kept in memory while they cannot be written: a folder may be read-only for ever."""
Fields = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")
_files = itertools.count()


def open_history(run: RunSettings, service: str) -> History | None:
    """Open the history of this process, if the run's settings ask for one."""
    return History(run.folder / FOLDER, run.id, service) if run.record_history else None


class History:
    """The operations of one process. Thread-safe. A full disk delays lines and never an operation."""

    def __init__(self, folder: Path, run_id: str, service: str) -> None:
        self._path = folder / f"{service}-{os.getpid()}-{time.time_ns()}-{next(_files)}.jsonl"
        self._file: int | None = None
        self._lock = threading.Lock()
        self._unwritten = b""
        self._is_failing = False
        self._operations = itertools.count(1)
        self._append(
            {
                "run": run_id,
                "service": service,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                # Those of other machines are compared by the time of day.
                "boot": read_boot(),
                "clock": time.monotonic(),
                "unix": time.time(),
            }
        )

    @contextmanager
    def record(self, operation: str, fields: Mapping[str, Any], takes: bool = False) -> Iterator[Fields]:
        """Record the body as an operation.

        Args:
            takes: write one line after the body, and only if the outcome has `entries`.

        Yields:
            The outcome: its `result`, and further fields that the body adds.
        """
        lost = count_lost_replies()
        began = time.monotonic()
        line = {"op": operation, **fields}
        number = 0 if takes else self._write(line, "at")
        outcome: Fields = {"result": OK}
        try:
            yield outcome
        except FencedError:
            outcome = {"result": REFUSED}
            raise
        except BaseException as error:
            outcome = {"result": f"{type(error).__name__}: {error}"}
            raise
        finally:
            if outcome["result"] == REFUSED and count_lost_replies() != lost:
                outcome["result"] = UNKNOWN  # by an earlier try of the same call, whose reply was lost
            if not takes:
                self._write({"n": number, **outcome}, "end")
            elif outcome.get("entries"):
                self._write({**line, "at": began, **outcome}, "end")

    def _write(self, line: Fields, moment: str) -> int:
        """Write a line that says when this moment was; returns the number of its operation."""
        with self._lock:
            number: int = line.get("n") or next(self._operations)
            self._append({"n": number, moment: time.monotonic(), **line})
        return number

    def _append(self, line: Fields) -> None:
        if len(self._unwritten) < _MOST_UNWRITTEN:  # what comes then is missing, and the check says so
            self._unwritten += json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            # The system has it from here on: SIGKILL loses nothing.
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                get_logger().warning("history_not_written", detail=str(error))
            self._is_failing = True


class _Client(Protocol):
    history: History | None
    epoch: int


C = TypeVar("C", bound=_Client)


def recorded(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Record every call of a method of the stream client in the client's history, if it has one."""
    name = method.__name__
    describe_arguments, describe_result = _OPERATIONS[name]
    takes = describe_result is _describe_entries

    @wraps(method)
    def call(client: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if client.history is None:
            return method(client, *args, **kwargs)
        fields = {"epoch": client.epoch, **describe_arguments(*args, **kwargs)}
        with client.history.record(name, fields, takes) as outcome:
            result = method(client, *args, **kwargs)
            outcome.update(describe_result(result))
            return result

    return call


# What is recorded: of the arguments before a call, whose names are those of the method, and of the result after it.


def _describe_prompt(prompt: Prompt) -> Fields:
    return {
        "stream": _shorten(prompt.reply_stream) or "trajectories",
        "batch": prompt.batch,
        "position": prompt.position,
        "attempt": prompt.attempt,
        "uid": prompt.group_uid,
    }


def _describe_group(group: Group | TrajectoryGroup) -> Fields:
    issue = {"batch": group.batch, "position": group.position, "attempt": group.attempt}
    return {**issue, "uid": group.group_uid}


def _describe_finish(entry: Any, group: PackedGroup) -> Fields:
    from forage_trajectory.codec import unpack_facts  # imports NumPy, which the command needs for nothing else here

    versions = [sorted({(s.version, s.epoch) for s in t.segments}) for t in unpack_facts(group).trajectories]
    stream = _shorten(entry.message.reply_stream) or "trajectories"
    return {"entry": entry.id.decode(), "stream": stream, **_describe_group(group.head), "versions": versions}


def _describe_ledger(ledger: LedgerEntry, ids: Any, ends: Any = None) -> Fields:
    return {
        "step": ledger.step,
        "uids": [*ledger.group_uids],
        "dropped": [*ledger.dropped_group_uids],
        "entries": [id.decode() for id in ids],
        "ends": [ledger.step] if ends is None else [*ends],
    }


def describe_policy(policy: Policy) -> Fields:
    """Describe a policy that is published, loaded or served, and whether it came in parts."""
    digests = sorted(file.digest for file in policy.files) or [policy.digest]
    return {"version": policy.version, "epoch": policy.epoch, "digests": digests, "parts": len(policy.parts)}


def _describe_stream(stream: str, *_: Any, **__: Any) -> Fields:
    return {"stream": _shorten(stream)}


def _describe_consumer(consumer: str, *_: Any, **__: Any) -> Fields:
    return {"consumer": consumer}


def _describe_discard(stream: str, ids: Any) -> Fields:
    return {"stream": _shorten(stream), "entries": [id.decode() for id in ids]}


def _describe_reject(stream: str, id: bytes, content: bytes) -> Fields:
    return {"stream": _shorten(stream), "entries": [id.decode()]}


def _describe_entries(entries: Any) -> Fields:
    is_prompt = entries and isinstance(entries[0].message, Prompt)
    describe = _describe_prompt if is_prompt else _describe_group
    return {"entries": [{"entry": entry.id.decode(), **describe(entry.message)} for entry in entries]}


def _describe_effect(done: Any) -> Fields:
    return {"result": REFUSED if done is False else OK}


def _shorten(stream: str) -> str:
    return stream.rpartition(":")[2]


_OPERATIONS: dict[str, tuple[Callable[..., Fields], Callable[[Any], Fields]]] = {
    "acquire_epoch": (lambda floor=0: {"floor": floor}, lambda epoch: {"epoch": epoch}),
    "issue": (_describe_prompt, _describe_effect),
    "claim_prompts": (_describe_consumer, _describe_entries),
    "take_over_prompts": (_describe_consumer, _describe_entries),
    "reclaim_prompts": (_describe_consumer, _describe_entries),
    "finish": (_describe_finish, _describe_effect),
    "claim_groups": (_describe_stream, _describe_entries),
    "reclaim_groups": (_describe_stream, _describe_entries),
    "acknowledge": (_describe_ledger, _describe_effect),
    "discard": (_describe_discard, _describe_effect),
    "reject": (_describe_reject, _describe_effect),
    "close_replies": (_describe_stream, _describe_effect),
    "publish": (describe_policy, _describe_effect),
}


def read_boot() -> str:
    """Read what names this start of this machine; processes with the same one share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()
