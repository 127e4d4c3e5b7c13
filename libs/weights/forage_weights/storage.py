"""Folders of policies at any address that fsspec understands: a path, s3://, gs://, …

Endpoint and credentials come from fsspec's configuration and the environment, never from an announcement.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from forage_runtime.files.durable import detect_full_disk
from forage_runtime.files.remote import StorageError, UnknownAddressError, open_address
from forage_weights.parallel import map_parallel

_RANGE = 32 * 2**20
_CONNECTIONS = 8
_PROBE = ".probe"


class StorageRefusedError(StorageError):
    """An address cannot be read or written until somebody changes something: waiting does not help."""


def find_local_folder(uri: str) -> Path | None:
    """Find the folder of this machine that an address names; None if it is elsewhere.

    Raises:
        StorageError: as `get_file`.
    """
    system, root = _open(uri)
    return Path(root) if isinstance(system, LocalFileSystem) else None


def get_file(uri: str, name: str, target: Path, size: int = 0) -> None:
    """Copy a file of a folder into a new file, in several parts at once.

    Args:
        size: bytes that it must have; 0 if unknown.

    Raises:
        StorageError: it cannot be read, or has another size.
        DiskFullError: there is no room for it.
    """
    system, root = _open(uri)
    path = _join(root, name)
    with _explain(uri, f"{name} cannot be read"):
        # Not from a listing of before: the file may be younger.
        system.invalidate_cache()
        found = system.size(path)
    if found is None or (size and found != size):
        raise StorageError(f"{uri}: {name} has {found} bytes, expected {size}: its upload is not complete")

    def copy(begin: int) -> None:
        end = min(begin + _RANGE, found)
        with _explain(uri, f"{name} cannot be read"):
            data = system.cat_file(path, start=begin, end=end)
        if len(data) != end - begin:
            raise StorageError(f"{uri}: {name} ends after {begin + len(data)} of {found} bytes")
        while data:
            written = os.pwrite(handle, data, begin)
            data, begin = memoryview(data)[written:], begin + written

    with detect_full_disk(target):
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            if found:
                os.posix_fallocate(handle, 0, found)  # a lack of room is known before anything is fetched
            map_parallel(copy, range(0, found, _RANGE), _CONNECTIONS)
        finally:
            os.close(handle)


def put_files(uri: str, files: Mapping[str, Path]) -> None:
    """Copy local files into a folder under these names; when it returns, all are there with their full size.

    Raises:
        StorageError: one cannot be written, or is not complete.
    """
    system, root = _open(uri)

    def put(name: str) -> None:
        with _explain(uri, f"{name} cannot be written"):
            system.put_file(str(files[name]), _join(root, name))

    with _explain(uri, "the folder cannot be created"):
        if isinstance(system, LocalFileSystem):
            system.makedirs(root, exist_ok=True)  # on an object store this would be an attempt to create the bucket
    map_parallel(put, files, _CONNECTIONS)
    sizes = list_sizes(uri)
    for name, file in files.items():
        if sizes.get(name) != file.stat().st_size:
            raise StorageError(
                f"{uri}: {name} has {sizes.get(name, 0)} bytes after its upload, expected {file.stat().st_size}"
            )


def probe_folder(uri: str) -> None:
    """Write a file into a folder, which is created, and delete it again.

    Raises:
        StorageRefusedError: there is no such bucket, no permission, or no file system for such addresses.
        StorageError: the folder cannot be written now.
    """
    with tempfile.NamedTemporaryFile() as empty:
        put_files(uri, {_PROBE: Path(empty.name)})
    system, root = _open(uri)
    with suppress(Exception):  # who may write and not delete can publish; old policies stay then
        system.rm_file(_join(root, _PROBE))


def list_sizes(uri: str) -> dict[str, int]:
    """List the files of a folder: name → bytes; none if it does not exist.

    Raises:
        StorageError: the address cannot be read.
    """
    system, root = _open(uri)
    with _explain(uri, "its files cannot be listed"):
        system.invalidate_cache()
        try:
            entries = system.ls(root, detail=True)
        except FileNotFoundError:
            return {}
    return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries if entry["type"] == "file"}


def list_folders(uri: str) -> list[str]:
    """List the names of the folders in a folder, sorted; none if it does not exist.

    Raises:
        StorageError: the address cannot be read.
    """
    system, root = _open(uri)
    with _explain(uri, "it cannot be listed"):
        system.invalidate_cache()
        try:
            entries = system.ls(root, detail=True)
        except FileNotFoundError:
            return []
    return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")


def delete_folder(uri: str) -> None:
    """Delete a folder and everything in it; nothing happens if it does not exist.

    Raises:
        StorageError: it cannot be deleted, or is a whole bucket or disk.
    """
    system, root = _open(uri)
    if "/" not in root.strip("/"):
        raise StorageError(f"{uri} is not deleted: it is no folder within a bucket or a disk")
    with _explain(uri, "it cannot be deleted"):
        system.invalidate_cache()
        try:
            system.rm(root, recursive=True)
        except FileNotFoundError:
            return


def _open(uri: str) -> tuple[Any, str]:
    """The file system of an address, and the folder's path in it."""
    try:
        return open_address(uri)
    except UnknownAddressError as error:
        raise StorageRefusedError(f"{uri}: no file system reads this address ({error})") from None


def _join(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}"


@contextmanager
def _explain(uri: str, what: str) -> Iterator[None]:
    """Turn any error of a file system into a `StorageError` with the remedy."""
    try:
        yield
    except Exception as error:
        # Every file system has errors of its own; those of credentials and connections differ in their names alone.
        kind = " ".join(found.__name__ for found in type(error).__mro__)
        explained: type[StorageError] = StorageRefusedError
        if isinstance(error, PermissionError) or "Credential" in kind:
            remedy = "check the credentials for this address"
        elif isinstance(error, FileNotFoundError):
            remedy = "check that its bucket or folder exists"
        elif "ParamValidation" in kind or getattr(error, "errno", None) in (errno.EROFS, errno.ENOTDIR):
            remedy = "give another address"
        elif "Connect" in kind or "Timeout" in kind or "DNS" in kind:
            explained, remedy = StorageError, "check the endpoint, and that it can be reached from here"
        else:
            explained, remedy = StorageError, "see the storage's own documentation"
        raise explained(f"{uri}: {what} ({_shorten(error)}): {remedy}") from error


def _shorten(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
