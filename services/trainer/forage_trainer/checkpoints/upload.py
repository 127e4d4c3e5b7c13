"""Copies checkpoints to another place while training goes on.

What waits is hard-linked below `checkpoints/.upload/`, so that neither retention nor a restart takes it away. A copy is
`<url>/<run id>/step_<n>/`, laid out as it is here; its manifest comes last, so what has one is complete.
"""

from __future__ import annotations

import threading
from pathlib import Path

from fsspec.core import url_to_fs
from prometheus_client import Counter, Gauge

from forage_common.errors import UserError
from forage_common.files import durable
from forage_common.telemetry.logs import get_logger
from forage_trainer.checkpoints.checkpoint import MANIFEST, checkpoints_in
from forage_trainer.files import new_folder, remove, remove_leftovers

ATTEMPTS = 5
"""Of one checkpoint in a row; then it waits for the next one to be saved, or for the next start."""
WAITING = 2
"""Checkpoints that may wait; an older one gives way."""
UPLOADED = Counter("forage_trainer_uploads_total", "Checkpoints copied to trainer.upload_url")
FAILED = Counter("forage_trainer_upload_failures_total", "Attempts to copy a checkpoint that failed")
DROPPED = Counter("forage_trainer_uploads_dropped_total", "Checkpoints that gave way to newer ones before their copy")
PENDING = Gauge("forage_trainer_uploads_waiting", "Checkpoints that wait for their copy")


class Uploader:
    """A thread that copies checkpoints, the newest first. Nothing that goes wrong here reaches the run."""

    def __init__(self, checkpoints: Path, url: str, run_id: str, pause_s: float = 5.0) -> None:
        """
        Args:
            checkpoints: their folder. What is there already, and was not copied in an earlier life, is copied too.
            pause_s: after a first failed attempt; doubles with each.

        Raises:
            UserError: nothing here reads such an address.
        """
        try:
            self._system, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"trainer.upload_url = '{url}' cannot be used ({error}): install what fsspec needs for it into the "
                "trainer's environment, or give another address"
            ) from None
        self._root = f"{root.rstrip('/')}/{run_id}"
        self._folder = checkpoints / ".upload"
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._wake, self._idle, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._current: Path | None = None
        self._given_up: set[Path] = set()
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        for path in checkpoints_in(checkpoints):
            self.add(path)
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def add(self, checkpoint: Path) -> None:
        """Have a durable checkpoint copied; returns at once."""
        with self._lock:
            target = self._folder / checkpoint.name
            try:
                if target != self._current:
                    with new_folder(target) as aside:
                        _link_tree(checkpoint, aside)
                for old in self._waiting()[:-WAITING]:
                    remove(old)
                    DROPPED.inc()
                    get_logger().warning("upload_dropped", checkpoint=old.name, reason="newer checkpoints wait")
            except OSError as error:
                FAILED.inc()
                get_logger().warning("upload_failed", checkpoint=checkpoint.name, reason=repr(error))
            self._given_up.clear()
            self._idle.clear()
            self._wake.set()

    def close(self, wait_s: float) -> bool:
        """End the thread, after waiting at most `wait_s` for what is not copied yet. Returns whether all is."""
        self._idle.wait(wait_s)
        self._closed.set()
        self._wake.set()
        self._thread.join(1.0)
        left = [path.name for path in checkpoints_in(self._folder)]
        if left:
            get_logger().warning("uploads_not_done", checkpoints=left, reason="the next start of this run copies them")
        return not left

    def _waiting(self) -> list[Path]:
        return [path for path in checkpoints_in(self._folder) if path != self._current]

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                waiting = [path for path in self._waiting() if path not in self._given_up]
                self._current = waiting[-1] if waiting else None
                PENDING.set(len(waiting))
                if self._current is None:
                    self._idle.set()
                    self._wake.clear()
            if self._current is None:
                self._wake.wait()
                continue
            done = self._insist(self._current)
            with self._lock:
                if done:
                    remove(self._current)
                else:
                    self._given_up.add(self._current)
                self._current = None

    def _insist(self, path: Path) -> bool:
        for attempt in range(ATTEMPTS):
            try:
                size = self._copy(path)
            except Exception as error:  # noqa: BLE001 - every file system has errors of its own; counted, never the run's
                FAILED.inc()
                get_logger().warning("upload_failed", checkpoint=path.name, attempt=attempt, reason=repr(error))
                if self._closed.wait(self._pause_s * 2**attempt):
                    return False
                continue
            if size:
                UPLOADED.inc()
                get_logger().info("checkpoint_uploaded", checkpoint=path.name, bytes=size, to=self._root)
            return True
        return False

    def _copy(self, path: Path) -> int:
        """Copy one checkpoint; returns its bytes, 0 if the copy was there."""
        target, manifest = f"{self._root}/{path.name}", (path / MANIFEST).read_bytes()
        known = f"{target}/{MANIFEST}"
        if self._system.exists(known):
            if self._system.cat_file(known) == manifest:
                return 0
            self._system.rm_file(known)
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and file != path / MANIFEST]
        for file in files:
            to = f"{target}/{file.relative_to(path).as_posix()}"
            self._system.makedirs(to.rpartition("/")[0], exist_ok=True)
            self._system.put_file(str(file), to)
        self._system.pipe_file(known, manifest)
        return len(manifest) + sum(file.stat().st_size for file in files)


def _link_tree(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        to = target / path.relative_to(source)
        if path.is_dir():
            to.mkdir()
        else:
            durable.link_or_copy(path, to)
