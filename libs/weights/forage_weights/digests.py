"""Digests of files: BLAKE3 over all cores. Those of SHA-256, which older checkpoints have, are verified."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

PREFIX = "blake3:"
# Bounds the memory, and is still in the processor's cache when it is hashed: larger ones were slower.
_CHUNK = 4 * 2**20
_DIGEST = re.compile(rf"(?:{PREFIX})?[0-9a-f]{{64}}")


def is_digest(text: str) -> bool:
    """Whether this is a digest: `blake3:` and 64 hex digits, or the 64 of SHA-256."""
    return _DIGEST.fullmatch(text) is not None


def compute_digest(source: Path | Any) -> str:
    """Compute the BLAKE3 digest of a file, or of an object with the buffer protocol, such as a NumPy array.

    Raises:
        OSError: the file cannot be read.
    """
    # Read rather than mapped: a file that is cut off meanwhile, or a lost server, is an error and not a SIGBUS.
    hashing = blake3(max_threads=blake3.AUTO)
    _feed(hashing, source)
    return PREFIX + str(hashing.hexdigest())


def verify_digest(file: Path, expected: str) -> bool:
    """Whether a file has this digest, of BLAKE3 or SHA-256.

    Raises:
        OSError: the file cannot be read.
    """
    if expected.startswith(PREFIX):
        return compute_digest(file) == expected
    hashing = hashlib.sha256()
    _feed(hashing, file)
    return hashing.hexdigest() == expected


def compute_content(digests: Mapping[str, str]) -> str:
    """Compute the digest of a whole policy from the names and digests of its files, in any order."""
    lines = "".join(f"{digests[name]} {name}\n" for name in sorted(digests))
    return compute_digest(lines.encode())


def _feed(hashing: Any, source: Path | Any) -> None:
    if not isinstance(source, Path):
        hashing.update(memoryview(source).cast("B"))
        return
    buffer = memoryview(bytearray(_CHUNK))
    with source.open("rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            hashing.update(buffer[:size])
