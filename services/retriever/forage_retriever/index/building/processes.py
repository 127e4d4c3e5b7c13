"""Runs parts of a build in several processes; the first that fails stops the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import Any

from forage_retriever.index.progress import Report
from forage_runtime.errors import DataError, ForageError, UserError
from forage_runtime.telemetry.logs import configure_logs

_SEND_S = 0.2
_STOP_S = 30.0
"""How long a stopped process has for its checkpoint."""

Work = Callable[[Report], None]


def run_all(work: Sequence[Work], jobs: int, report: Report) -> None:
    """Run all work, `jobs` at once, each in a process of its own; with one job in this process, one after the other.

    Stages are reported as `shard N: stage`.

    Raises:
        UserError: of the first that failed. The others are stopped, with a checkpoint.
    """
    if jobs == 1:
        for number, one in enumerate(work):
            one(_name_shard(report, number))
        return
    waiting = list(enumerate(work))
    running: dict[connection.Connection, tuple[int, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, one = waiting.pop(0)
                receiver, process = _start(one)
                running[receiver] = number, process
            for ready in connection.wait(list(running), timeout=1.0):  # wait: their progress, which is shown
                assert isinstance(ready, connection.Connection)
                number, process = running[ready]
                if _receive(ready, number, process, report):
                    del running[ready]
                    ready.close()
                    process.join()
    finally:
        _stop([process for _, process in running.values()])


def _start(work: Work) -> tuple[connection.Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, sender))
    process.start()
    sender.close()
    return receiver, process


def _receive(receiver: connection.Connection, number: int, process: SpawnProcess, report: Report) -> bool:
    """Take one message of a process; returns whether it was its last.

    Raises:
        UserError: the process failed.
    """
    try:
        kind, content = receiver.recv()
    except EOFError:
        process.join(_STOP_S)
        raise UserError(
            f"shard {number}: its process was ended by {_describe_end(process.exitcode)}: run the same command again,"
            " which resumes, with fewer --jobs if memory was short"
        ) from None
    if kind == "progress":
        _name_shard(report, number)(*content)
    elif kind != "done":
        # Data that is wrong cannot be resumed, whatever else went wrong can.
        raise (DataError if kind == "data" else UserError)(f"shard {number}: {content}")
    return bool(kind == "done")


def _describe_end(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _stop(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    end = time.monotonic() + _STOP_S
    for process in processes:
        process.join(max(end - time.monotonic(), 0.0))
        if process.is_alive():
            process.kill()
            process.join()


def _name_shard(report: Report, number: int) -> Report:
    return lambda stage, done, total: report(f"shard {number}: {stage}", done, total)


def _run(work: Work, sender: connection.Connection) -> None:
    """The process: run the work, and send its progress and its end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that what is open gets its checkpoint
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logs("retriever", "WARNING")  # the parent reports
    try:
        work(_SendingReport(sender))
        sender.send(("done", None))
    except ForageError as error:
        sender.send(("data" if isinstance(error, DataError) else "user", str(error)))
    except KeyboardInterrupt:
        pass  # of the terminal; the parent has it too
    except Exception as error:  # noqa: BLE001 - the parent reports it, with this shard's number
        traceback.print_exc()
        sender.send(("user", f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """End this process where its parent was killed: a resumed build must not wait for it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _SendingReport:
    """Sends progress to the parent, a few times a second."""

    def __init__(self, sender: connection.Connection) -> None:
        self._sender = sender
        self._last: tuple[Any, float] = (None, 0.0)

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        before, sent = self._last
        now = time.monotonic()
        if stage != before or done == total or (total is None and not done) or now - sent >= _SEND_S:
            self._last = stage, now
            self._sender.send(("progress", (stage, done, total)))
