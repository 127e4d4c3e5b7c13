"""Run pytest again and again, each time in a fork of this process, which has imported what takes long.

usage: forked_pytest.py [MODULE …]          import these modules first

Reads a run a line, as JSON: `arguments` of pytest, environment `variables`, `paths` where Python looks first, and the
file for its `output`. Writes the process of the run when it has begun, and its exit code when it has ended. A run is as
`python -m pytest` with PYTHONPATH, in a session of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import pytest


def main(modules: list[str]) -> None:
    replies = os.dup(1)
    os.dup2(2, 1)  # modules print while they are imported
    for module in modules:
        importlib.import_module(module)
    if ours := [name for name in sys.modules if name.startswith("forage_")]:
        sys.exit(f"forked_pytest: {ours[0]} would be the same in every run")
    for line in sys.stdin:
        process = os.fork()
        if not process:
            _run(json.loads(line))
        os.write(replies, f"{process}\n".encode())
        status = os.waitpid(process, 0)[1]
        os.write(replies, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run(run: dict[str, Any]) -> None:
    """Become a run of pytest; never returns."""
    code = 3
    try:
        os.setsid()
        for mode, source, targets in ((os.O_RDONLY, os.devnull, (0,)), (os.O_WRONLY, run["output"], (1, 2))):
            opened = os.open(source, mode)
            for target in targets:
                os.dup2(opened, target)
        os.environ.update(run["variables"])
        sys.path[0:1] = [os.getcwd(), *run["paths"]]
        code = int(pytest.main(run["arguments"]))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
