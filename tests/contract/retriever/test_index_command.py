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
    assert index("build", "one", "--corpus", corpus, "--filter-field", "topic").returncode == 0
    shown = index("inspect", "one").stdout
    for part in ("60", "bm25, dense, hybrid", "topic", "minilm", "384", "Flat", "mapped from disk"):
        assert part in shown
    kept = json.loads(index("inspect", "one", "--json").stdout)
    assert kept["passages"] == PASSAGES
    assert index("verify", "one").stdout == "one: all " + f"{len(kept['files'])} files are as they were built\n"
    converted = index("convert", "one", "two", "-f", "SQ8")
    assert "SQ8" in converted.stdout, converted.stderr
    assert index("verify", "two").returncode == 0
    file = tmp_path / "two/dense/index.faiss"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    checked = index("verify", "two")
    assert checked.returncode == 1
    assert "dense/index.faiss has the digest" in checked.stderr
    assert manifest.check_files(tmp_path / "one", manifest.read_manifest(tmp_path / "one")) == []


def test_shards_are_built_and_shown_one_by_one(index: IndexCommand, corpus: Path) -> None:
    cut = index("build", "cut", "--corpus", corpus, "--mode", "bm25", "--shards", "3")
    assert cut.returncode == 0, cut.stderr
    assert [f"shard-{n}" in cut.stdout for n in range(4)] == [True, True, True, False]
    assert index("verify", "cut").stdout.count("files are as they were built") == 3


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
RUN_ALL = """
import contextlib, io, json, sys
from forage_retriever.command.main import main

outcomes = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, errors, code = ["forage index", *arguments], io.StringIO(), 0
    with contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    outcomes.append((code, errors.getvalue()))
print(json.dumps(outcomes))
"""
"""Runs commands one after the other in one process, whose start takes longer than they do."""


def test_a_user_error_is_one_sentence_and_exit_code_2(index: IndexCommand, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("")
    done = index(json.dumps([arguments for arguments, _ in ERRORS]), script=RUN_ALL)
    assert done.returncode == 0, done.stderr
    for (arguments, sentence), (code, errors) in zip(ERRORS, json.loads(done.stdout), strict=True):
        assert code == 2, arguments
        assert sentence in errors, arguments
        assert "Traceback" not in errors, arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "taken"]
    alone = index(*ERRORS[0][0])
    assert (alone.returncode, "Traceback" in alone.stderr) == (2, False)


def test_another_index_is_not_overwritten_and_the_same_is_not_rebuilt(index: IndexCommand, corpus: Path) -> None:
    options = ["--corpus", corpus, "--mode", "bm25"]
    assert index("build", "one", *options).returncode == 0
    assert index("build", "one", *options).returncode == 0
    other = index("build", "one", *options, "--filter-field", "topic")
    assert other.returncode == 2
    assert "one is there already and is another index" in other.stderr
