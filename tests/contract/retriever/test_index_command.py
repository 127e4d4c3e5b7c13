"""`forage index` as a process: build, inspect, verify, convert, and its error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from index_command import IndexCommand, write_topics

from forage_retriever.index import manifest

PASSAGES = 60


@pytest.fixture
def index(repository: Path, tmp_path: Path) -> IndexCommand:
    return IndexCommand(repository, tmp_path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    write_topics(file, PASSAGES)
    return file


def test_an_index_is_inspected_verified_and_converted(index: IndexCommand, corpus: Path, tmp_path: Path) -> None:
    built, inspected, as_json, verified, converted, verified_again = index.run_all(
        ["build", "one", "--corpus", corpus, "--filter-field", "topic"],
        ["inspect", "one"],
        ["inspect", "one", "--json"],
        ["verify", "one"],
        ["convert", "one", "two", "-f", "SQ8"],
        ["verify", "two"],
    )
    assert built.returncode == 0, built.stderr
    for part in ("60", "bm25, dense, hybrid", "topic", "minilm", "384", "Flat", "mapped from disk"):
        assert part in inspected.stdout
    description = json.loads(as_json.stdout)
    assert description["passages"] == PASSAGES
    assert verified.stdout == f"one: all {len(description['files'])} files are as they were built\n"
    assert "SQ8" in converted.stdout, converted.stderr
    assert verified_again.returncode == 0
    file = tmp_path / "two/dense/index.faiss"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    checked = index("verify", "two")
    assert checked.returncode == 1
    assert "dense/index.faiss has the digest" in checked.stderr
    assert manifest.check_files(tmp_path / "one", manifest.read_manifest(tmp_path / "one")) == []


def test_shards_are_built_and_inspected_separately(index: IndexCommand, corpus: Path) -> None:
    options = ["--corpus", corpus, "--mode", "bm25", "--shards", "3"]
    built, verified = index.run_all(["build", "cut", *options], ["verify", "cut"])
    assert built.returncode == 0, built.stderr
    assert [f"shard-{n}" in built.stdout for n in range(4)] == [True, True, True, False]
    assert verified.stdout.count("files are as they were built") == 3


ERRORS = [
    (["build", "out", "--corpus", "absent.jsonl", "--mode", "bm25"], "corpus absent.jsonl cannot be read"),
    (["build", "out", "--corpus", "corpus.jsonl", "-f", "Flatt"], "faiss_factory 'Flatt' is not an index"),
    (["build", "out", "--corpus", "corpus.jsonl", "--vectors", "int4"], "--vectors is 'int4': give auto, none"),
    (["build", "out", "retriever.mod=bm25"], "unknown setting 'retriever.mod'"),
    (["build", "taken", "--corpus", "corpus.jsonl", "--mode", "bm25"], "taken is not an index"),
    (["convert", "new", "-f", "SQ8"], "convert takes OLD NEW"),
    (["convert", "old", "taken", "-f", "SQ8"], "taken is there already"),
    (["convert", "old", "new", "-f", "SQ8"], "old is not an index"),
    (["convert", "new", "--faiss", "corpus.jsonl", "--corpus", "corpus.jsonl"], "corpus.jsonl cannot be read"),
    (["inspect", "absent"], "absent is not an index"),
    (["verify", "taken"], "taken is not an index"),
]


def test_a_user_error_is_one_sentence_and_exit_code_2(index: IndexCommand, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("")
    for (_, sentence), done in zip(ERRORS, index.run_all(*(command for command, _ in ERRORS)), strict=True):
        assert done.returncode == 2, done
        assert sentence in done.stderr, done
        assert "Traceback" not in done.stderr, done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "taken"]
    alone = index(*ERRORS[0][0])
    assert (alone.returncode, "Traceback" in alone.stderr) == (2, False)


def test_another_index_is_not_overwritten_and_the_same_is_not_rebuilt(index: IndexCommand, corpus: Path) -> None:
    command = ["build", "one", "--corpus", corpus, "--mode", "bm25"]
    first, again, other = index.run_all(command, command, [*command, "--filter-field", "topic"])
    assert (first.returncode, again.returncode, other.returncode) == (0, 0, 2)
    assert "one is there already and is another index" in other.stderr
