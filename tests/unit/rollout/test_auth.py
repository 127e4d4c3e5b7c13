"""The token file: its valid contents, and its rotation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forage_runtime.errors import SettingsError
from forage_runtime.security.token_file import TokenFile, authorization_metadata, read_token


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no single token"),
        (b" \n", "holds no single token"),
        (b"two words", "holds no single token"),
        ("schlüssel".encode(), "not ASCII"),
    ],
)
def test_a_file_without_a_token_is_refused_by_name(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=sentence) as error:
        TokenFile(file)
    assert f"rollout.auth_token_file {file}" in str(error.value)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        TokenFile(tmp_path / "none")


def test_only_the_right_token_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    token = TokenFile(file)
    assert token.accepts(authorization_metadata(file)[0][1])
    assert token.accepts("bearer secret")
    for wrong in ("", "secret", "Bearer", "Bearer secre", "Bearer secrets", "Basic secret", "Bearer sécret"):
        assert not token.accepts(wrong), wrong
    assert authorization_metadata(None) == ()


def test_a_new_token_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    token = TokenFile(file)
    replacement = tmp_path / "replacement"
    replacement.write_text("later")
    os.utime(replacement, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))  # even where the times are the same
    replacement.replace(file)
    assert token.accepts("Bearer later")
    assert not token.accepts("Bearer first")


def test_the_last_token_stays_valid_while_the_file_is_missing_or_empty(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    token = TokenFile(file)
    file.unlink()
    assert token.accepts("Bearer first")
    file.write_text("")
    assert token.accepts("Bearer first")
    assert not token.accepts("Bearer ")
    file.write_text("second")
    assert token.accepts("Bearer second")
    assert read_token(file) == "second"
