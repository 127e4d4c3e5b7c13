"""Measures families of models one after the other, each in a forked process with a time limit: some end theirs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Measure = Callable[[str, Path], dict[str, Any]]
"""A family and its folder → results."""


def measure_families(stage: str, kinds: Sequence[str], measure: Measure, limit_s: float) -> None:
    """Write FOLDER/KIND/STAGE.json for each of `kinds` that has none yet; the command line says FOLDER.

    The caller should have imported what `measure` needs, and have started no thread.
    """
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), help="families, with commas between them")
    parser.add_argument("--again", action="store_true", help="measure families again that are done")
    chosen = parser.parse_args()
    if unknown := set(chosen.only or ()) - set(kinds):
        parser.error(f"--only: {', '.join(sorted(unknown))}: not among the families {', '.join(kinds)}")
    kinds = [kind for kind in kinds if chosen.only is None or kind in chosen.only]
    for number, kind in enumerate(kinds, 1):
        folder = chosen.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{stage}.json"
        if file.exists() and not chosen.again:
            continue
        file.unlink(missing_ok=True)
        began = time.monotonic()
        result = _measure_apart(kind, folder, stage, measure, limit_s)
        seconds = time.monotonic() - began
        file.write_text(json.dumps(result | {"seconds": round(seconds, 1)}), encoding="utf-8")
        note = str(result.get("error", ""))[:100]
        sys.stdout.write(f"{stage} {number}/{len(kinds)} {kind}: {seconds:.1f} s {note}\n")
        sys.stdout.flush()


def _measure_apart(kind: str, folder: Path, stage: str, measure: Measure, limit_s: float) -> dict[str, Any]:
    part, log = folder / f"{stage}.part", folder / f"{stage}.log"
    part.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            part.write_text(json.dumps(measure(kind, folder)), encoding="utf-8")
        except BaseException:  # noqa: BLE001 - the child must not return into the loop; it is in the log
            traceback.print_exc()
        os._exit(0)
    status = _wait(child, limit_s)
    if part.exists():
        result: dict[str, Any] = json.loads(part.read_text(encoding="utf-8"))
        part.unlink()
        return result
    if status is None:
        return {"error": f"no result within {limit_s:g} s"}
    if os.WIFSIGNALED(status):
        return {"error": f"ends the process: {signal.Signals(os.WTERMSIG(status)).name}"}
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return {"error": next((line for line in reversed(lines) if line.strip()), "no result")}


def _wait(child: int, limit_s: float) -> int | None:
    """Wait for a process's status; None: it was killed at the limit."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
