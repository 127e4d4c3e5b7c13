"""Copies what a service reads to its volume: `fetch.py FOLDER PATH=URL …`.

URL is a folder, a file or a tar archive (.tar, .tar.gz, .tgz) at any address that fsspec reads. What is at PATH is
complete: it is copied aside and renamed. Beside it stands its URL, so that another URL is copied again and the same one
is not; what somebody else put there is left alone. Pods that share the volume take turns.
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
    """Have what is at `url` at `target`; False where it was there already.

    Raises:
        Exception: nothing reads such an address, or it does not give what it should.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    source = target.with_name(f".{target.name}.url")
    with _turn(target):
        if target.exists() and (not source.exists() or source.read_text() == url):
            return False
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as aside:
            new, old = Path(aside) / "new", Path(aside) / "old"
            _copy(url, new)
            os.sync()
            if target.exists():
                target.rename(old)
            source.write_text("")
            new.rename(target)
            source.write_text(url)
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
            place = new / os.path.relpath(file, root.rstrip("/"))
            place.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(file, str(place))
    else:
        system.get_file(root, str(new))


@contextlib.contextmanager
def _turn(target: Path) -> Iterator[None]:
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: all copy, and the last one stays
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Exit code 1 with one sentence where something cannot be copied: the kubelet tries again."""
    folder = Path(arguments[0])
    for argument in arguments[1:]:
        path, _, url = argument.partition("=")
        place = folder / path
        try:
            done = f"copied from {url}" if fetch(url, place) else "there"
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            sys.stderr.write(f"fetch: {url} cannot be copied to {place} ({type(error).__name__}: {error})\n")
            return 1
        sys.stderr.write(f"fetch: {place} is {done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
