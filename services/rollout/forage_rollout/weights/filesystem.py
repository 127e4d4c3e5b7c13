"""Policies in folders: local ones are read where they are, others are fetched through fsspec first."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.weights import BACKEND
from forage_rollout.weights.policy import (
    SUFFIX,
    PolicyError,
    Shapes,
    announced_files,
    described,
    tensor_shapes,
    verify_files,
    verify_shapes,
)
from forage_rollout.weights.transport import Shipment

KEPT = 3
_PARTIAL = ".partial-"


class Filesystem:
    """Whole policies as safetensors files.

    Args:
        expected: `read_model_shapes` of the model that the engine was started with.
        cache: folder for what is fetched; engines of one machine may share it.
    """

    backend = BACKEND

    def __init__(self, expected: Shapes, cache: Path) -> None:
        self._expected = expected
        self._cache = cache

    async def prepare(self, policy: Policy) -> Shipment:
        """See `Transport.prepare`."""
        return await asyncio.to_thread(self._prepare, policy)

    def _prepare(self, policy: Policy) -> Shipment:
        weights = [file for file in fetch(policy, self._cache) if file.suffix == SUFFIX]
        verify_shapes(policy, tensor_shapes(policy, weights), self._expected)
        return Shipment({"paths": [str(file) for file in weights]})


def fetch(policy: Policy, cache: Path) -> list[Path]:
    """The policy's files on this machine, verified: its own, or copies of remote ones in `cache`.

    Raises:
        PolicyError: nothing reads such an address, or a file is missing or is not what was announced.
    """
    try:
        source, root = url_to_fs(policy.uri)
    except (ImportError, ValueError) as error:
        raise PolicyError(f"{described(policy)}: nothing here reads such an address ({error})") from None
    if isinstance(source, LocalFileSystem):
        return verify_files(policy, Path(root))
    files = announced_files(policy)
    digest = hashlib.sha256("\n".join(f"{files[name]} {name}" for name in sorted(files)).encode()).hexdigest()
    folder = cache / digest
    try:
        verify_files(policy, folder)
    except PolicyError:
        _copy(policy, source, root, folder)
    os.utime(folder)
    _prune(cache, folder)
    return [folder / name for name in files]


def _copy(policy: Policy, source: AbstractFileSystem, root: str, folder: Path) -> None:
    """Copy and verify beside the place where the files belong, then move them there as one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder.parent) as partial:
        place = Path(partial) / folder.name
        place.mkdir()
        try:
            for name in announced_files(policy):
                source.get_file(f"{root.rstrip('/')}/{name}", str(place / name))
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            raise PolicyError(f"{described(policy)} cannot be fetched ({type(error).__name__}: {error})") from None
        verify_files(policy, place)
        try:
            place.rename(folder)
        except OSError:  # there is one: another engine of this machine was faster, or it is damaged
            try:
                verify_files(policy, folder)
            except PolicyError:
                shutil.rmtree(folder)
                place.rename(folder)


def _prune(cache: Path, newest: Path) -> None:
    """Keep the policies used last; one that another engine removed at the same time is gone as well."""
    folders = [entry for entry in cache.iterdir() if entry.is_dir() and not entry.name.startswith(_PARTIAL)]
    for old in sorted(folders, key=_used, reverse=True)[KEPT:]:
        if old != newest:
            shutil.rmtree(old, ignore_errors=True)


def _used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
