"""Outlives the main process by a moment: when that is killed, ends what Ray leaves behind and removes its folder.

Run as a script with a folder; started with a pipe on stdin that only the main process holds. It remembers the main
process's descendants, since Ray's processes overwrite their environment with a title and lose their parents with the
raylet. Standard library only, so that it costs a few megabytes.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_LOOK_S = 2.0
_PATIENCE_S = 1.0
Family = dict[int, str]  # pid → when it started, which tells it from a later process of the same number


def processes() -> dict[int, tuple[int, str]]:
    """Every process: pid → (parent, start time in clock ticks since boot). Zombies are left out."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        if fields[0] != "Z":
            found[int(folder.name)] = (int(fields[1]), fields[19])
    return found


def descendants(roots: set[int], table: dict[int, tuple[int, str]]) -> Family:
    """All children of the roots, their children, and so on."""
    family: Family = {}
    reached = set(roots)
    while True:
        new = {pid: start for pid, (parent, start) in table.items() if parent in reached and pid not in family}
        if not new:
            return family
        family |= new
        reached |= new.keys()


def alive(family: Family) -> Family:
    """Those of the family that still run, and their descendants by now."""
    table = processes()
    running = {pid: start for pid, start in family.items() if table.get(pid, (0, ""))[1] == start}
    return running | descendants(set(running), table)


def reap(family: Family, folder: Path) -> None:
    """End the family, newcomers included, then remove the folder."""
    time.sleep(_PATIENCE_S)
    while family := alive(family):
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Watch until stdin ends, which it does when the main process closes its end or is gone."""
    parent, family = os.getppid(), Family()
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        family = alive(family) | descendants({parent}, processes())
        family.pop(os.getpid(), None)
    reap(alive(family), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
