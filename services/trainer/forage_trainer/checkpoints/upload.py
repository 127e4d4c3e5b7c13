"""Uploads checkpoints to `trainer.upload_url` while training continues.

A waiting checkpoint is hard-linked below `checkpoints/.upload/`, so that neither retention nor a restart removes it.
A copy is `<url>/<run id>/step_<n>/`, in the local layout. Its manifest is written last: with it, a copy is complete.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge

from forage_runtime.files import durable
from forage_runtime.files.folders import remove_folder, remove_leftovers, stage_folder
from forage_runtime.files.remote import open_file_system
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import idling, waiting
from forage_trainer.checkpoints.manifest import MANIFEST, list_checkpoints

ATTEMPTS = 5
"""Attempts at one checkpoint in a row; then it waits until another one is saved, or for the next start."""
MAX_WAITING = 2
"""Checkpoints that may wait; older ones are dropped."""
UPLOADED = Counter("forage_trainer_uploads_total", "Checkpoints copied to trainer.upload_url")
FAILED = Counter("forage_trainer_upload_failures_total", "Attempts to copy a checkpoint that failed")
DROPPED = Counter("forage_trainer_uploads_dropped_total", "Checkpoints dropped for newer ones before they were copied")
PENDING = Gauge("forage_trainer_uploads_waiting", "Checkpoints that wait to be copied")


def open_upload(url: str) -> tuple[Any, str]:
    """Open `trainer.upload_url`; raises as `open_file_system`."""
    return open_file_system(url, "trainer.upload_url", "the trainer's environment")


class Uploader:
    """A thread that copies checkpoints, the newest first. Failures are counted and logged; none ends the run."""

    def __init__(self, checkpoints: Path, url: str, run_id: str, pause_s: float = 5.0) -> None:
        """
        Args:
            checkpoints: their folder. Checkpoints that an earlier process did not copy are copied too.
            pause_s: pause after a first failed attempt; doubles with each.

        Raises:
            UserError: no installed file system has such addresses.
        """
        self._system, root = open_upload(url)
        self._root = f"{root.rstrip('/')}/{run_id}"
        self._folder = checkpoints / ".upload"
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._wake, self._idle, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._current: Path | None = None
        self._given_up: set[Path] = set()
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        for path in list_checkpoints(checkpoints):
            self.add(path)
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def add(self, checkpoint: Path) -> None:
        """Queue a durable checkpoint; returns at once."""
        with self._lock:
            target = self._folder / checkpoint.name
            try:
                if target != self._current:
                    with stage_folder(target) as staging:
                        shutil.copytree(checkpoint, staging, copy_function=durable.link_or_copy, dirs_exist_ok=True)
                for old in self._list_waiting()[:-MAX_WAITING]:
                    remove_folder(old)
                    DROPPED.inc()
                    get_logger().warning("upload_dropped", checkpoint=old.name, reason="newer checkpoints wait")
            except OSError as error:
                FAILED.inc()
                get_logger().warning("upload_failed", checkpoint=checkpoint.name, reason=repr(error))
            self._given_up.clear()
            self._idle.clear()
            self._wake.set()

    def close(self, wait_s: float) -> bool:
        """End the thread, after waiting at most `wait_s` for the queue. Returns whether every checkpoint is copied."""
        with waiting("uploads of checkpoints", on="trainer.upload_url", limit_s=wait_s):
            self._idle.wait(wait_s)
        self._closed.set()
        self._wake.set()
        self._thread.join(1.0)
        left = [path.name for path in list_checkpoints(self._folder)]
        if left:
            get_logger().warning("uploads_not_done", checkpoints=left, reason="the next start of this run copies them")
        return not left

    def _list_waiting(self) -> list[Path]:
        return [path for path in list_checkpoints(self._folder) if path != self._current]

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                waiting = [path for path in self._list_waiting() if path not in self._given_up]
                self._current = waiting[-1] if waiting else None
                PENDING.set(len(waiting))
                if self._current is None:
                    self._idle.set()
                    self._wake.clear()
            if self._current is None:
                with idling("checkpoints to upload", on="the training"):
                    self._wake.wait()
                continue
            copied = self._copy_with_retries(self._current)
            with self._lock:
                if copied:
                    remove_folder(self._current)
                else:
                    self._given_up.add(self._current)
                self._current = None

    def _copy_with_retries(self, path: Path) -> bool:
        for attempt in range(ATTEMPTS):
            try:
                size = self._copy(path)
            except Exception as error:  # noqa: BLE001 - every file system has its own errors; they must not end the run
                FAILED.inc()
                get_logger().warning("upload_failed", checkpoint=path.name, attempt=attempt, reason=repr(error))
                pause_s = self._pause_s * 2**attempt
                with waiting("another attempt to upload", on="trainer.upload_url", limit_s=pause_s, detail=repr(error)):
                    if self._closed.wait(pause_s):
                        return False
                continue
            if size:
                UPLOADED.inc()
                get_logger().info("checkpoint_uploaded", checkpoint=path.name, bytes=size, to=self._root)
            return True
        return False

    def _copy(self, path: Path) -> int:
        """Copy one checkpoint; returns its bytes, 0 if the copy existed."""
        target, manifest = f"{self._root}/{path.name}", (path / MANIFEST).read_bytes()
        remote_manifest = f"{target}/{MANIFEST}"
        if self._system.exists(remote_manifest):
            if self._system.cat_file(remote_manifest) == manifest:
                return 0
            # Another content under this name: without its manifest it counts as incomplete while it is replaced.
            self._system.rm_file(remote_manifest)
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and file != path / MANIFEST]
        for file in files:
            to = f"{target}/{file.relative_to(path).as_posix()}"
            self._system.makedirs(to.rpartition("/")[0], exist_ok=True)
            self._system.put_file(str(file), to)
        self._system.pipe_file(remote_manifest, manifest)
        return len(manifest) + sum(file.stat().st_size for file in files)
