"""The stores of the runs that pages have asked for."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from upath import UPath

from forage_console.context import FolderOf
from forage_console.store.run_store import RunStore
from forage_console.store.table import Database
from forage_runtime.telemetry.logs import get_logger

_KEPT_DAYS = 30
_NAME_BYTES = 12


class Stores:
    """The stores of all runs."""

    def __init__(self, cache: Path | None) -> None:
        """
        Args:
            cache: folder for tables and indexes; None: one below the user's for caches, or a temporary one.
        """
        self._cache = cache or _find_cache()
        _prune(self._cache)
        self._lock = threading.Lock()
        self._stores: dict[str, RunStore] = {}
        self._database: Database | None = None
        atexit.register(self.close)  # a thread in DuckDB while Python ends aborts the process

    def open(self, run: UPath) -> RunStore:
        """Return the store of a run, with the files that are there now."""
        with self._lock:
            self._database = self._database or Database()
            name = str(run)
            store = self._stores.get(name)
            if store is None:
                folder = _make_folder(self._cache / blake2b(name.encode(), digest_size=_NAME_BYTES).hexdigest())
                store = self._stores[name] = RunStore(run, self._database, folder)
        store.refresh()
        return store

    def close(self) -> None:
        """Stop the threads and close the files; once more does nothing."""
        atexit.unregister(self.close)
        for store in self._stores.values():
            store.close()
        if self._database is not None:
            self._database.close()


def _make_folder(folder: Path) -> Path:
    """Make a folder, or a temporary one where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        get_logger().warning("cache_not_writable", folder=str(folder), reason=str(error))
        return Path(tempfile.mkdtemp(prefix="forage-console-"))


def _prune(cache: Path) -> None:
    """Delete what was made of runs that nobody has looked at for long."""
    oldest = time.time() - _KEPT_DAYS * 86400
    with suppress(OSError):
        for folder in cache.iterdir():
            if re.fullmatch(rf"[0-9a-f]{{{2 * _NAME_BYTES}}}", folder.name) and folder.stat().st_mtime < oldest:
                get_logger().info("cache_pruned", folder=str(folder))
                shutil.rmtree(folder, ignore_errors=True)


def _find_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "forage" / "console"


def _find(request: Request, folder: FolderOf) -> RunStore:
    """The store of the run that the path names; the stores of an application are made at the first request."""
    state = request.app.state
    with _MAKING:
        if not hasattr(state, "stores"):
            state.stores = Stores(state.console.settings.console.cache_dir)
    store: RunStore = state.stores.open(folder)
    return store


_MAKING = threading.Lock()
StoreOf = Annotated[RunStore, Depends(_find)]
