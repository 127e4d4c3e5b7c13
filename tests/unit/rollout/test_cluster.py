"""Processes and folders that a killed service leaves behind are removed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from forage_rollout.deployments import reaper
from forage_rollout.deployments.cluster import lock_folder, remove_abandoned


def test_the_reaper_ends_processes_that_a_killed_process_leaves_behind(tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    script = (
        "import subprocess, sys, time\n"
        f"r = subprocess.Popen([sys.executable, '-I', '-S', {reaper.__file__!r}, {str(folder)!r}],"
        " stdin=subprocess.PIPE, start_new_session=True)\n"
        "c = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(r.pid, c.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        watcher, child = (psutil.Process(int(pid)) for pid in main.stdout.readline().split())
        time.sleep(3)  # the reaper looks every two seconds
        assert child.is_running()
        main.kill()
        psutil.wait_procs([watcher, child], timeout=20)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert not folder.exists()


def test_only_folders_without_a_running_owner_are_removed(tmp_path: Path) -> None:
    for name in ("forage-ray-dead", "forage-ray-alive", "forage-ray-new", "other"):
        (tmp_path / name).mkdir()
    lock_folder(tmp_path / "forage-ray-dead").close()
    with lock_folder(tmp_path / "forage-ray-alive"):
        remove_abandoned(tmp_path)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["forage-ray-alive", "forage-ray-new", "other"]
