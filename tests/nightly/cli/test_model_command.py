"""`forage model` in the trainer's environment."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from forage_cli.commands.model import app
from forage_runtime.errors import DataError


def test_a_file_that_is_no_gguf_is_refused_by_the_trainers_environment(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_text("not a model")
    done = CliRunner().invoke(app, ["smollm2", "--gguf", str(file), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, DataError)
    assert "mine.gguf cannot be read as GGUF" in str(done.exception)
    assert not (tmp_path / "out").exists()
