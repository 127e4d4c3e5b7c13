"""Corpora in Parquet, which another process reads."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest
from retriever_parts import write_corpus

from forage_retriever.corpus import read
from forage_runtime.errors import DataError
from forage_runtime.files.parquet_rows import PARQUET_READER


def test_a_parquet_file_that_cannot_be_read_is_named(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARQUET_READER, str(repository / ".venvs/cli/bin/python"))
    with pytest.raises(DataError, match=f"{tmp_path / 'absent.parquet'} cannot be read"):
        list(read.read_passages(tmp_path / "absent.parquet"))


def test_the_file_format_does_not_change_the_corpus(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = repository / ".venvs/cli/bin/python"
    monkeypatch.setenv(PARQUET_READER, str(python))
    rows = [
        {"id": str(n), "contents": f'"T{n}"\nté\u2028xt {n}', "year": n, "tags": ["a", "b"][: n % 3]} for n in range(50)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "plain.jsonl").write_text("".join(lines))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/part-0.jsonl").write_text("".join(lines[:20]))
    (tmp_path / "folder/part-1.jsonl.gz").write_bytes(gzip.compress("".join(lines[20:]).encode()))
    convert = "import json, sys; from pyarrow import Table, parquet; rows = map(json.loads, open(sys.argv[1])); "
    convert += "parquet.write_table(Table.from_pylist(list(rows)), sys.argv[2])"
    subprocess.run([python, "-c", convert, tmp_path / "plain.jsonl", tmp_path / "table.parquet"], check=True)
    corpora = {}
    for name in ("plain.jsonl", "packed.jsonl.gz", "folder", "table.parquet"):
        out = tmp_path / f"{name}.store"
        out.mkdir()
        corpora[name] = write_corpus(out, read.read_passages(tmp_path / name), ["year", "tags"])
    assert len({corpus.digest for corpus in corpora.values()}) == 1
    assert [json.loads(row) for row in corpora["table.parquet"].rows] == rows
    assert corpora["table.parquet"].columns.compute_mask((("tags", ("b",)),)).tolist() == [
        n % 3 == 2 for n in range(50)
    ]
