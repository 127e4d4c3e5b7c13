"""Digests of files and of whole policies."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from forage_weights.digests import compute_content, compute_digest, is_digest, verify_digest

EMPTY = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"  # from the BLAKE3 specification


def test_a_digest_is_blake3_of_a_file_or_of_memory(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert compute_digest(tmp_path / "empty") == compute_digest(b"") == EMPTY
    data = np.random.default_rng(0).integers(0, 2**16, 5_000_000, np.uint16)
    (tmp_path / "file").write_bytes(data.tobytes())
    assert compute_digest(tmp_path / "file") == compute_digest(data) == compute_digest(data.tobytes())
    assert compute_digest(data[1:]) != compute_digest(data)


def test_digests_of_both_kinds_are_verified(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"weights")
    for digest in (compute_digest(file), hashlib.sha256(b"weights").hexdigest()):
        assert is_digest(digest)
        file.write_bytes(b"weights")
        assert verify_digest(file, digest)
        file.write_bytes(b"weightz")
        assert not verify_digest(file, digest)
    with pytest.raises(FileNotFoundError):
        verify_digest(tmp_path / "absent", EMPTY)


@pytest.mark.parametrize("text", ["", "blake3:", "sha256:" + 64 * "0", 63 * "0", 64 * "G", EMPTY.upper(), EMPTY + "\n"])
def test_other_texts_are_no_digests(text: str) -> None:
    assert not is_digest(text)


def test_the_content_of_a_policy_depends_on_names_and_digests_alone() -> None:
    content = compute_content({"a": EMPTY, "b": 64 * "0"})
    assert content == compute_content({"b": 64 * "0", "a": EMPTY})
    assert content != compute_content({"a": 64 * "0", "b": EMPTY})
    assert content != compute_content({"a": EMPTY})
