"""A process that ends waits for the threads of its stores: one inside DuckDB while Python ends would abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from step_runs import build_step_row, write_steps

PROGRAM = """
import sys
from pathlib import Path
from upath import UPath
from forage_console.store.run_store import RunStore
from forage_console.store.stores import Stores

def load(store, file):
    print("loading", flush=True)
    store._stop.wait()
    print("stopped", flush=True)

RunStore._load = load
Stores(Path(sys.argv[2])).open(UPath(sys.argv[1]))
"""


def test_a_process_that_ends_stops_the_threads_of_its_stores(tmp_path: Path) -> None:
    run = tmp_path / "runs/one"
    write_steps(run, [build_step_row(1, text="red apple")])
    command = [sys.executable, "-c", PROGRAM, str(run), str(tmp_path / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "loading\nstopped\n"), ended.stderr
