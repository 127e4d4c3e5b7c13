"""`forage index` as a process: shards, indexes that are there already, and an object store of the S3 protocol."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from index_command import IndexCommand, write_topics
from s3_server import BUCKET, serve_s3

PASSAGES = 60


@pytest.fixture
def index(repository: Path, tmp_path: Path) -> IndexCommand:
    return IndexCommand(repository, tmp_path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    write_topics(file, PASSAGES)
    return file


def test_shards_are_built_and_inspected_separately(index: IndexCommand, corpus: Path) -> None:
    options = ["--corpus", corpus, "--mode", "bm25", "--shards", "3"]
    built, verified = index.run_all(["build", "cut", *options], ["verify", "cut"])
    assert built.returncode == 0, built.stderr
    assert [f"shard-{n}" in built.stdout for n in range(4)] == [True, True, True, False]
    assert verified.stdout.count("files are as they were built") == 3


def test_a_file_of_vectors_is_cut_into_shards_by_several_processes(
    index: IndexCommand, corpus: Path, tmp_path: Path
) -> None:
    file = tmp_path / "whole/dense/index.faiss"
    built, cut, verified = index.run_all(
        ["build", "whole", "--corpus", corpus, "--mode", "dense", "-f", "SQ8"],
        ["convert", "cut", "--faiss", file, "--corpus", corpus, "--mode", "dense", "--shards", "3", "--jobs", "2"],
        ["verify", "cut"],
    )
    assert built.returncode == cut.returncode == 0, (built, cut)
    assert verified.stdout.count("files are as they were built") == 3


def test_another_index_is_not_overwritten_and_the_same_is_not_rebuilt(index: IndexCommand, corpus: Path) -> None:
    command = ["build", "one", "--corpus", corpus, "--mode", "bm25"]
    first, again, other = index.run_all(command, command, [*command, "--filter-field", "topic"])
    assert (first.returncode, again.returncode, other.returncode) == (0, 0, 2)
    assert "one is there already and is another index" in other.stderr


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
