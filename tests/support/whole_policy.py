"""Announcements of whole policies in a single file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forage_proto.v1.trajectory_pb2 import Policy


def announce_whole(folder: Path, uri: str, version: int = 1) -> Policy:
    """The policy in a folder, as it is announced under an address."""
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return Policy(version=version, epoch=1, uri=uri, digest=digest)
