"""The filesystem transport: local policies are read in place, remote ones are copied through fsspec first."""

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
from forage_rollout.weights.policy import (
    SUFFIX,
    PolicyError,
    Shapes,
    describe_policy,
    list_files,
    read_tensor_shapes,
    verify_files,
    verify_shapes,
)

MAX_KEPT = 3
_PARTIAL = ".partial-"


class FilesystemTransport:
    """Whole policies as safetensors files.

    Args:
        expected: `read_model_shapes` of the model that the engine was started with.
        cache: folder for copies; engines of one machine may share it.
    """

    def __init__(self, expected: Shapes, cache: Path) -> None:
        self._expected = expected
        self._cache = cache

    async def prepare(self, policy: Policy) -> list[Path]:
        """Fetch and verify a policy; generation goes on meanwhile.

        Raises:
            PolicyError: the policy must not be served.
        """
        return await asyncio.to_thread(self._prepare, policy)

    def _prepare(self, policy: Policy) -> list[Path]:
        weights = [file for file in fetch_policy(policy, self._cache) if file.suffix == SUFFIX]
        verify_shapes(policy, read_tensor_shapes(policy, weights), self._expected)
        return weights


def fetch_policy(policy: Policy, cache: Path) -> list[Path]:
    """The verified files of a policy on this machine: its own, or copies in `cache` of remote ones.

    Raises:
        PolicyError: no fsspec implementation reads the address, or a file is missing or differs from the announcement.
    """
    try:
        source, root = url_to_fs(policy.uri)
    except (ImportError, ValueError) as error:
        raise PolicyError(f"{describe_policy(policy)}: no file system reads this address ({error})") from None
    if isinstance(source, LocalFileSystem):
        return verify_files(policy, Path(root))
    files = list_files(policy)
    # Named by content: policies of different runs never collide, a repeated announcement finds its copy.
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
    """Copy and verify in a temporary folder, then rename: `folder` is never partially visible."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder.parent) as partial:
        copy = Path(partial) / folder.name
        copy.mkdir()
        try:
            for name in list_files(policy):
                source.get_file(f"{root.rstrip('/')}/{name}", str(copy / name))
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            raise PolicyError(
                f"{describe_policy(policy)} cannot be fetched ({type(error).__name__}: {error})"
            ) from None
        verify_files(policy, copy)
        try:
            copy.rename(folder)
        except OSError:  # it exists: another engine of this machine was faster, or it is damaged
            try:
                verify_files(policy, folder)
            except PolicyError:
                shutil.rmtree(folder)
                copy.rename(folder)


def _prune(cache: Path, newest: Path) -> None:
    """Keep the `MAX_KEPT` policies used last. Another engine may remove the same folders at the same time."""
    folders = [entry for entry in cache.iterdir() if entry.is_dir() and not entry.name.startswith(_PARTIAL)]
    for old in sorted(folders, key=_last_used, reverse=True)[MAX_KEPT:]:
        if old != newest:
            shutil.rmtree(old, ignore_errors=True)


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
