"""Artifacts that are built once: a folder per digest, written in a staging directory and renamed, so never partial."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from forage_runtime.errors import UserError
from forage_runtime.files import durable
from forage_runtime.telemetry.logs import get_logger

_HASHED_BYTES = 2**20
_STAGING_PREFIX = f".building-{socket.gethostname()}-"


def compute_digest(*parts: str) -> str:
    """SHA-256 of texts in order; lengths are hashed too, so that no two lists have the same digest."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    return digest.hexdigest()


def hash_files(files: Iterable[Path], progress: Callable[[int], None] = lambda read: None) -> str:
    """SHA-256 of the content of files in order; `progress` gets the bytes read since its last call."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(_HASHED_BYTES):
                digest.update(block)
                progress(len(block))
    return digest.hexdigest()


def build_once(cache_dir: Path, kind: str, digest: str, build: Callable[[Path], None]) -> Path:
    """The folder `<cache_dir>/<kind>-<digest>`, built by `build(folder)` if it is not there.

    If two processes build the same artifact, both use the one that is renamed first.

    Raises:
        UserError: the folder cannot be written.
    """
    final = cache_dir / f"{kind}-{digest[:16]}"
    if final.is_dir():
        return final
    log = get_logger()
    log.info("artifact_building", kind=kind, folder=str(final))
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache_dir)
        staging_dir = Path(tempfile.mkdtemp(prefix=f"{_STAGING_PREFIX}{os.getpid()}-", dir=cache_dir))
    except OSError as error:
        raise make_unwritable_error(cache_dir, error) from None
    try:
        build(staging_dir)
        durable.sync_tree(staging_dir)
        staging_dir.chmod(0o755)
        staging_dir.rename(final)
    except OSError as error:
        if not final.is_dir():
            raise make_unwritable_error(cache_dir, error) from None
    finally:
        shutil.rmtree(staging_dir, ignore_errors=True)
    log.info("artifact_built", kind=kind, folder=str(final))
    return final


def _remove_abandoned(cache_dir: Path) -> None:
    """Remove staging directories of killed processes of this machine."""
    for staging_dir in cache_dir.glob(f"{_STAGING_PREFIX}*"):
        pid = staging_dir.name.removeprefix(_STAGING_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(staging_dir, ignore_errors=True)


def make_unwritable_error(cache_dir: Path, error: OSError) -> UserError:
    """The error for a cache that cannot be written."""
    reason = error.strerror or str(error)
    return UserError(
        f"{cache_dir} cannot be written ({reason}): free space there, or set retriever.cache_dir to a writable folder"
    )
