"""Copies files that a service reads to its volume: `fetch.py FOLDER PATH=URL …`.

URL is a folder, a file or a tar archive (.tar, .tar.gz, .tgz) at any address that fsspec reads. PATH is never partial:
the copy goes to a staging folder and is renamed. The URL is stored next to PATH, so that only a changed URL is copied
again; a PATH that this program did not create is not touched. Pods that share the volume take turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fsspec.core import url_to_fs

ARCHIVES = (".tar", ".tar.gz", ".tgz")


def fetch(url: str, target: Path) -> bool:
    """Copy `url` to `target`. Returns False if `target` exists and is current.

    Raises:
        Exception: fsspec cannot read the address, or the archive is not safe to extract.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    source = target.with_name(f".{target.name}.url")
    with _lock(target):
        if target.exists() and (not source.exists() or source.read_text(encoding="utf-8") == url):
            return False
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as staging_dir:
            new, old = Path(staging_dir) / "new", Path(staging_dir) / "old"
            _copy(url, new)
            os.sync()
            if target.exists():
                target.rename(old)
            source.write_text("", encoding="utf-8")
            new.rename(target)
            source.write_text(url, encoding="utf-8")
    return True


def _copy(url: str, new: Path) -> None:
    system, root = url_to_fs(url)
    if url.endswith(ARCHIVES):
        with system.open(root, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
            archive.extractall(new, filter="data")
    elif system.isdir(root):
        files = system.find(root)
        if not files:
            raise FileNotFoundError(f"{url} is an empty folder")
        for file in files:
            copy = new / os.path.relpath(file, root.rstrip("/"))
            copy.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(file, str(copy))
    else:
        system.get_file(root, str(new))


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: all pods copy, the last copy stays
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Copy all; returns exit code 1 after the first failure, so that the kubelet tries again."""
    folder = Path(arguments[0])
    for argument in arguments[1:]:
        name, _, url = argument.partition("=")
        path = folder / name
        try:
            outcome = f"copied from {url}" if fetch(url, path) else "there"
        except Exception as error:  # noqa: BLE001 - every file system raises its own errors
            sys.stderr.write(f"fetch: {url} cannot be copied to {path} ({type(error).__name__}: {error})\n")
            return 1
        sys.stderr.write(f"fetch: {path} is {outcome}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
