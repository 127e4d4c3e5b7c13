"""Copies files that a service reads to its volume: `fetch.py FOLDER PATH=URL …`.

URL is a folder, a file or a tar archive (.tar, .tar.gz, .tgz) at any address that fsspec reads; that of a folder behind
http(s) ends in "/". PATH is never partial: the copy goes to a staging folder beside it and is renamed. Who is stopped
leaves that to the next one, which goes on where the copy ended, but begins again an archive and what may have changed.
The URL is stored next to PATH, so that only a changed URL is copied again; a PATH that this program did not create is
not touched. Pods of one volume take turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

ARCHIVES = (".tar", ".tar.gz", ".tgz")
BLOCK_BYTES = 2**24


def fetch(url: str, target: Path) -> bool:
    """Copy `url` to `target`. Returns False if `target` exists and is current.

    Raises:
        Exception: fsspec cannot read the address, or the archive is not safe to extract.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    source = target.with_name(f".{target.name}.url")
    with _lock(target) as alone:
        if target.exists() and (not source.exists() or source.read_text(encoding="utf-8") == url):
            return False
        staging = target.with_name(f".{target.name}.part" if alone else f".{target.name}.part-{socket.gethostname()}")
        new, old = staging / "new", staging / "old"
        _copy(url, staging, new)
        os.sync()
        if target.exists():
            target.rename(old)
        source.write_text("", encoding="utf-8")
        new.rename(target)
        source.write_text(url, encoding="utf-8")
        shutil.rmtree(staging)
    return True


def _copy(url: str, staging: Path, new: Path) -> None:
    """Copy `url` to `new` in the staging folder, of which what an earlier copy of the same files left is kept."""
    system, root = url_to_fs(url)
    if url.endswith(ARCHIVES):
        _prepare(staging, "")
        with system.open(root, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
            archive.extractall(new, filter="data")
        return
    if url.endswith("/") or not system.isfile(root):
        root = root.rstrip("/")
        files = {os.path.relpath(file, root): file for file in sorted(system.find(root))}
        if not files:
            raise FileNotFoundError(f"{url} is missing or an empty folder")
    else:
        files = {".": root}
    sizes = {name: system.size(file) for name, file in files.items()}
    states = [(name, sizes[name], _find_version(system, file)) for name, file in files.items()]
    _prepare(staging, json.dumps([url, states]) if all(version for *_, version in states) else "")
    for name, file in files.items():
        copy = new / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(system, file, copy, sizes[name])


def _find_version(system: AbstractFileSystem, file: str) -> str:
    """What changes with the content of a file; empty where a server does not say."""
    if "http" not in system.protocol:
        return str(system.ukey(file))
    info = system.info(file)  # fsspec's own key of such a file is its address
    return " ".join(str(info[name]) for name in ("ETag", "Content-MD5", "Digest", "Last-Modified") if name in info)


def _prepare(staging: Path, state: str) -> None:
    """Make the staging folder empty, unless it is of the same files in the same state; an empty state never is."""
    record = staging / "state"
    if not state or not record.exists() or record.read_text(encoding="utf-8") != state:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        record.write_text(state, encoding="utf-8")


def _copy_file(system: AbstractFileSystem, file: str, copy: Path, size: int | None) -> None:
    """Copy what `copy` lacks of a file, whose size None is unknown."""
    if size is None:
        system.get_file(file, str(copy))
        return
    there = copy.stat().st_size if copy.exists() else 0
    if copy.exists() and there == size:
        return
    try:
        with copy.open("ab" if there else "wb") as target, system.open(file, "rb", block_size=BLOCK_BYTES) as stream:
            if there:
                stream.seek(there)
            shutil.copyfileobj(stream, target, BLOCK_BYTES)
    except ValueError:  # so fsspec says that a server sends whole files only
        system.get_file(file, str(copy))
    if copy.stat().st_size != size:
        raise OSError(f"{file} has {size} bytes, and {copy.stat().st_size} arrived")


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[bool]:
    """Wait for other pods; False where the file system has no locks: then all of them copy, and the last copy stays."""
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


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
