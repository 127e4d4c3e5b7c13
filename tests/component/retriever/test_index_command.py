"""`forage index` in this process: build, inspect, verify, convert, and its error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from index_command import write_topics

from forage_retriever.command import main
from forage_retriever.index import manifest

PASSAGES = 60


class Index:
    """Runs commands in the test's folder, one after the other: to start an interpreter takes seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        self._monkeypatch.setattr(sys, "argv", ["forage index", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        output = self._capsys.readouterr()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), output.out, output.err)

    def run_all(self, *commands: Sequence[str | Path]) -> list[subprocess.CompletedProcess[str]]:
        return [self(*command) for command in commands]


@pytest.fixture
def index(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Index:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORAGE__RETRIEVER__CACHE_DIR", str(repository / ".cache/retriever"))
    return Index(monkeypatch, capsys)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    write_topics(file, PASSAGES)
    return file


def test_an_index_is_inspected_verified_and_converted(index: Index, corpus: Path, tmp_path: Path) -> None:
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


def test_a_copy_is_reported_in_sentences(index: Index, corpus: Path, tmp_path: Path) -> None:
    _, pushed = index.run_all(
        ["build", "one", "--corpus", corpus, "--mode", "bm25"], ["push", "one", str(tmp_path / "copies/one")]
    )
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout == f"one is at {tmp_path}/copies/one\n"
    assert "copying bytes: " in pushed.stderr
    assert "{" not in pushed.stderr, "log lines of services"


def test_a_user_error_is_one_sentence_and_exit_code_2(index: Index, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("")
    for (_, sentence), done in zip(ERRORS, index.run_all(*(command for command, _ in ERRORS)), strict=True):
        assert done.returncode == 2, done
        assert sentence in done.stderr, done
        assert "Traceback" not in done.stderr, done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "taken"]
