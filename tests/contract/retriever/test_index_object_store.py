"""`forage index push` and `pull` with an object store: a real server of the S3 protocol."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from index_command import IndexCommand, write_topics
from s3_server import BUCKET, serve_s3

PASSAGES = 60


def test_an_index_goes_to_an_object_store_and_comes_back(
    repository: Path, tmp_path: Path, free_address: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_topics(tmp_path / "corpus.jsonl", PASSAGES)
    with serve_s3(free_address().rpartition(":")[2], tmp_path / "s3.log") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        index = IndexCommand(repository, tmp_path)
        url = f"s3://{BUCKET}/indexes/topics"
        built, pushed, pulled, verified, again, missing = index.run_all(
            ["build", "topics", "--corpus", "corpus.jsonl", "--mode", "bm25", "--shards", "2"],
            ["push", "topics", url],
            ["pull", url, "copies/topics"],
            ["verify", "copies/topics"],
            ["pull", url, "copies/topics"],
            ["pull", f"s3://{BUCKET}/indexes/none", "none"],
        )
    assert built.returncode == pushed.returncode == pulled.returncode == 0, (built, pushed, pulled)
    assert "30" in pulled.stdout
    assert verified.stdout.count("files are as they were built") == 2
    assert (again.returncode, missing.returncode) == (2, 2)
    assert "copies/topics is there already" in again.stderr
    assert "does not exist" in missing.stderr
    assert not (tmp_path / "none").exists()
