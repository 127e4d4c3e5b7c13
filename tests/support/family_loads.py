"""A program: what vLLM gives for tiny random models after loads in place, and when it is started afresh.

`family_loads.py FOLDER KIND …` builds two models a family in the folder and prints a JSON line for each: the largest
difference of a log-probability after a load in place from an engine that was started with the same policy (`there`),
the same after a second load, back to the first policy (`back`), and how far the two policies differ (`moved`).

A child a start: vLLM is imported once, and no engine follows another one in a process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from family_serving import ENGINE, load_in_place, score, start_engine

from forage_rollout.vllm_start.vllm_args import build_environment

os.environ |= build_environment(ENGINE)

import vllm.entrypoints.llm  # noqa: F401  (once, before the forks)
from model_families import VOCABULARY, build_family, move_weights
from scored_rows import draw_rows

Scores = list[list[float]]


def write_policies(kind: str, folder: Path) -> None:
    """Write two policies of a family, `a` and `b`, that differ in every weight."""
    model = build_family(kind)
    for seed, policy in enumerate("ab", 5):
        move_weights(model, seed)
        model.save_pretrained(folder / policy)


def load_there_and_back(folder: Path) -> list[Scores]:
    """The scores of a, of b loaded in place, and of a loaded in place of b."""
    llm, _ = start_engine(folder / "a")
    rows = draw_rows(VOCABULARY)
    found = [score(llm, rows)]
    for number, policy in enumerate("ba", 1):
        load_in_place(llm, folder / policy, number)
        found.append(score(llm, rows))
    return found


def load_afresh(folder: Path) -> list[Scores]:
    return [score(start_engine(folder / "b")[0], draw_rows(VOCABULARY))]


def run_apart(work: Callable[[Path], list[Scores]], folder: Path) -> list[Scores]:
    """Run in a child of this process; raises a RuntimeError with its error."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(work, folder, there))
    child.start()
    there.close()
    try:
        answer: Any = here.recv()
    except EOFError:
        answer = "its process has died"
    child.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    found: list[Scores] = answer
    return found


def _answer(work: Callable[[Path], list[Scores]], folder: Path, pipe: Any) -> None:
    try:
        pipe.send(work(folder))
    except BaseException as error:  # noqa: BLE001 - told to the caller
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(0)  # vLLM's own end waits for processes that it has not started here


def compare(ones: Scores, others: Scores) -> float:
    return max(abs(a - b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True))


def measure(kind: str, folder: Path) -> dict[str, Any]:
    """See the module."""
    try:
        write_policies(kind, folder)
        start, there, back = run_apart(load_there_and_back, folder)
        (fresh,) = run_apart(load_afresh, folder)
    except (RuntimeError, ValueError) as error:
        return {"kind": kind, "error": str(error)}
    return {"kind": kind, "there": compare(there, fresh), "back": compare(back, start), "moved": compare(start, fresh)}


if __name__ == "__main__":
    for family in sys.argv[2:]:
        sys.stdout.write(json.dumps(measure(family, Path(sys.argv[1]) / family)) + "\n")
        sys.stdout.flush()
