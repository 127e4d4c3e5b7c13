"""What is built once and kept: a folder per digest, written aside and renamed into place, so never half there."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from forage_common.errors import UserError
from forage_common.files import durable
from forage_common.telemetry.logs import get_logger

_ASIDE = f".building-{socket.gethostname()}-"


def digest_of(*parts: str) -> str:
    """SHA-256 of texts in order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    return digest.hexdigest()


def built(cache_dir: Path, kind: str, digest: str, build: Callable[[Path], None]) -> Path:
    """The folder `<cache_dir>/<kind>-<digest>`, built by `build(folder)` if it is not there.

    Of two processes that build the same, one's work is kept and both go on with it.

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
        _sweep(cache_dir)
        aside = Path(tempfile.mkdtemp(prefix=f"{_ASIDE}{os.getpid()}-", dir=cache_dir))
    except OSError as error:
        raise unwritable(cache_dir, error) from None
    try:
        build(aside)
        durable.sync_tree(aside)
        aside.chmod(0o755)
        aside.rename(final)
    except OSError as error:
        if not final.is_dir():
            raise unwritable(cache_dir, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log.info("artifact_built", kind=kind, folder=str(final))
    return final


def _sweep(cache_dir: Path) -> None:
    """Remove what processes of this machine left behind when they were killed."""
    for left in cache_dir.glob(f"{_ASIDE}*"):
        pid = left.name.removeprefix(_ASIDE).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def unwritable(cache_dir: Path, error: OSError) -> UserError:
    """The error for a cache that cannot be written."""
    reason = error.strerror or str(error)
    return UserError(
        f"{cache_dir} cannot be written ({reason}): free space there, or set retriever.cache_dir to a writable folder"
    )
