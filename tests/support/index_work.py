"""Work for the processes of a build, which import it by its name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from waiting import wait_until

from forage_retriever.index.progress import Report
from forage_runtime.errors import DataError, UserError


def note(folder: Path, name: str, report: Report) -> None:
    report(name, 1, 2)
    (folder / name).write_text(str(os.getpid()))


def fail_when_begun(folder: Path, kind: str, report: Report) -> None:
    wait_until((folder / "begun").exists)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"user": UserError, "data": DataError, "bug": ZeroDivisionError}[kind]("out of luck")


def wait_for_ever(folder: Path, report: Report) -> None:
    (folder / "begun").touch()
    try:
        time.sleep(600)
    finally:  # as a stage that writes its checkpoint
        (folder / "unwound").touch()


def note_and_wait(folder: Path, name: str, report: Report) -> None:
    (folder / f"{name}.part").write_text(str(os.getpid()))
    (folder / f"{name}.part").rename(folder / f"{name}.pid")
    time.sleep(600)
