"""Processes that a killed service leaves behind are ended."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
from waiting import wait_until

from forage_rollout.deployments import reaper


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_process_whose_name_is_no_utf8_ends_no_reaper() -> None:
    naming = "import ctypes, time; ctypes.CDLL(None).prctl(15, bytes([0x78, 0xFF])); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", naming], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        name = Path(f"/proc/{other.pid}/comm").read_bytes()
        try:
            assert name == bytes([0x78, 0xFF, 0x0A])
            assert reaper.list_processes()[other.pid][0] == psutil.Process().pid
        finally:
            other.kill()


def is_reaped(folder: Path, wait_s: float) -> bool:
    """Kill a process with a reaper and a child after some seconds; whether the reaper has ended the child."""
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
        time.sleep(wait_s)
        assert child.is_running()
        main.kill()
        wait_until(lambda: is_gone(watcher))
        ended = is_gone(child)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
        return ended


def test_the_reaper_ends_processes_that_a_killed_process_leaves_behind(tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    # The reaper looks every two seconds. It cannot end what it has never seen, and is slow on a busy machine.
    assert any(is_reaped(folder, wait_s) for wait_s in (2.5, 30.0, 120.0))
    assert not folder.exists()


def test_the_end_of_a_raylet_or_gcs_is_found_and_everything_else_is_ended(tmp_path: Path) -> None:
    for name in ("raylet", "gcs_server"):
        shutil.copy("/bin/sleep", tmp_path / name)
    (tmp_path / "worker.py").write_text("import signal; signal.signal(15, signal.SIG_IGN); signal.pause()")
    script = (
        "import json, os, subprocess, sys, time\n"
        "from forage_runtime.settings import Settings\n"
        "from forage_rollout.deployments import cluster as module\n"
        "class Cluster(module.LocalCluster):\n"
        "    def start(self): self._vital = module.find_vital_processes()\n"
        "module._ABANDON_TIMEOUT_S = 300\n"
        "folder, victim = sys.argv[1:]\n"
        "cluster = Cluster(Settings())\n"
        "before = cluster.find_failure()\n"
        "def run(*c): return subprocess.Popen(c, start_new_session=True)\n"
        "own = {n: run(f'{folder}/{n}', '600') for n in ('raylet', 'gcs_server')}\n"
        "worker = run(sys.executable, f'{folder}/worker.py')\n"
        "cluster.start()\n"
        "healthy = cluster.find_failure()\n"
        "own[victim].kill()\n"
        "while not (failure := cluster.find_failure()): time.sleep(0.01)\n"
        "cluster.abandon()\n"
        "left = [p.pid for p in (*own.values(), worker) if p.poll() is None]\n"
        "print(json.dumps([before, healthy, failure, own[victim].pid, left, str(cluster._folder)]), flush=True)\n"
        "os._exit(1)\n"
    )
    for victim, title in (("raylet", "raylet"), ("gcs_server", "GCS")):
        command = [sys.executable, "-c", script, str(tmp_path), victim]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        before, healthy, failure, pid, left, folder = json.loads(run.stdout)
        assert (before, healthy, failure) == ("", "", f"Ray's {title} (process {pid}) has ended")
        assert left == []
        assert not Path(folder).exists()
