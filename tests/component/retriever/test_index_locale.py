"""An index of texts beyond ASCII, built and read in a locale that is not UTF-8."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ascii_locale import build_ascii_environment

ROW = {"id": "0", "contents": "富士山\n富士山は日本一高い山である。", "region": "静岡県"}


def test_an_index_with_a_field_in_japanese_is_built_and_read(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps(ROW, ensure_ascii=False) + "\n", encoding="utf-8")
    for arguments, part in (
        (["build", "one", "--corpus", "corpus.jsonl", "--mode", "bm25", "--filter-field", "region"], b""),
        (["inspect", "one"], b"region"),
        (["verify", "one"], b"as they were built"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "forage_retriever.command", *arguments],
            cwd=tmp_path,
            env=build_ascii_environment() | {"FORAGE__RETRIEVER__CACHE_DIR": str(repository / ".cache/retriever")},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode("ascii")
        assert part in done.stdout
