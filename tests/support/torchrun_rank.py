"""A process of torchrun: `torchrun_rank.py FOLDER 0=ACTION 1=ACTION`.

An action is an exit code, "wait", or "save SECONDS": wait for SIGTERM, then take that long to end with 143.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path


def main(folder: Path, *actions: str) -> int:
    rank = os.environ["RANK"]
    action = dict(text.split("=", 1) for text in actions)[rank]
    if action.isdecimal():
        return int(action)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    (folder / f"{rank}-waits").touch()
    stop.wait(60)
    if action.startswith("save "):
        threading.Event().wait(float(action.removeprefix("save ")))
        (folder / f"{rank}-saved").touch()
    return 143


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
