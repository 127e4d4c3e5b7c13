"""Cleans up after a main process that was killed: ends the processes that Ray leaves behind and removes its folder.

Run as a script with the folder as argument and a pipe on stdin that only the main process holds: its end says that the
main process is gone, or has given up its Ray. The reaper remembers the descendants of the main process, because Ray's
processes cannot be found by environment (they overwrite it with a title) or parent (they lose it with the raylet). It
imports only the standard library, so that it needs a few megabytes.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_POLL_INTERVAL_S = 2.0
_GRACE_PERIOD_S = 1.0
Processes = dict[int, str]
"""pid → start time, which tells a process from a later one with the same pid."""


def list_processes() -> dict[int, tuple[int, str]]:
    """Every process except zombies: pid → (parent, start time in clock ticks since boot)."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # As bytes: any process of the machine may have a name that is no UTF-8.
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if fields[0] != b"Z":
            processes[int(folder.name)] = (int(fields[1]), fields[19].decode())
    return processes


def find_descendants(roots: set[int], table: dict[int, tuple[int, str]]) -> Processes:
    """All children of the roots, their children, and so on."""
    family: Processes = {}
    reached = set(roots)
    while True:
        new = {pid: start for pid, (parent, start) in table.items() if parent in reached and pid not in family}
        if not new:
            return family
        family |= new
        reached |= new.keys()


def find_alive(family: Processes) -> Processes:
    """The processes of the family that still run, and their descendants by now."""
    table = list_processes()
    running = {pid: start for pid, start in family.items() if table.get(pid, (0, ""))[1] == start}
    return running | find_descendants(set(running), table)


def reap(family: Processes, folder: Path) -> None:
    """End the family, processes that it starts meanwhile included, then remove the folder."""
    time.sleep(_GRACE_PERIOD_S)  # wait: has a time limit
    while family := find_alive(family):
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)  # wait: until killed processes are gone
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Watch until stdin ends, which happens when the main process closes its end or is killed."""
    parent, family = os.getppid(), Processes()
    while not select.select([sys.stdin], [], [], _POLL_INTERVAL_S)[0]:
        family = find_alive(family) | find_descendants({parent}, list_processes())
        family.pop(os.getpid(), None)
    if os.getppid() == parent:  # it goes on and wants everything ended: also what it started just now
        family |= find_descendants({parent}, list_processes())
        family.pop(os.getpid(), None)
    reap(find_alive(family), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
