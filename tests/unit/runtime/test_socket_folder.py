"""Sockets have a folder in which their paths are short enough."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from forage_runtime.errors import UserError
from forage_runtime.files import socket_folder
from forage_runtime.files.socket_folder import find_socket_folder
from forage_runtime.ray_environment import LONGEST_SOCKET


def test_sockets_are_with_other_temporary_files_where_their_paths_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    room = 107 - 1 - len(str(tmp_path))
    assert find_socket_folder("s" * room) == tmp_path
    assert find_socket_folder("s" * (room + 1)) == Path("/tmp")


def test_without_a_short_folder_the_sentence_names_tmpdir_and_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("d" * 28)))
    monkeypatch.setattr(socket_folder, "_SHORT", (str(tmp_path / "none"),))
    with pytest.raises(UserError, match=r"TMPDIR is .*longer than 107 bytes: set TMPDIR to .* at most 23 bytes"):
        find_socket_folder(LONGEST_SOCKET)
