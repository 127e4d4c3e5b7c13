"""`forage index` as people run it: killed and run again, on damaged folders, on a corpus of some size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forage_common.settings import RetrieverSettings
from forage_retriever.index import load, manifest

Run = Callable[..., subprocess.CompletedProcess[str]]

PASSAGES = 60

KILLED = """
import os, signal, sys
from forage_retriever.corpus import store
from forage_common.files import durable
from forage_retriever.command.main import main
from forage_retriever.index import stages, workspace
from forage_retriever.search import bm25, faiss_build

stages.PART = 16
owner, name, count = {
    "reading": (store.CorpusWriter, "add_passage", 30),
    "indexing words": (bm25, "split_contents", 30),
    "second part": (stages.VectorsWriter, "append", 2),
    "checkpoint": (durable, "write_atomically", 1),
    "trained": (faiss_build, "add_vectors", 1),
    "writing": (faiss_build, "write_index", 1),
    "in place": (workspace.Workspace, "discard", 1),
}[sys.argv[1]]
inner, calls = getattr(owner, name), []

def counting(*arguments, **named):
    calls.append(1)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(*arguments, **named)

setattr(owner, name, counting)
sys.argv = ["forage index", *sys.argv[2:]]
main()
"""
"""Kills itself at a place: before the n-th call of a function."""


@pytest.fixture
def python(repository: Path) -> str:
    found = repository / ".venvs/retriever/bin/python"
    return str(found if found.exists() else sys.executable)


@pytest.fixture
def environment(repository: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    return kept | {"OMP_NUM_THREADS": "1", "FORAGE__RETRIEVER__CACHE_DIR": str(repository / ".cache/retriever")}


@pytest.fixture
def index(python: str, environment: dict[str, str], tmp_path: Path) -> Run:
    def run(*arguments: str | Path, script: str = "") -> subprocess.CompletedProcess[str]:
        how = ["-c", script] if script else ["-m", "forage_retriever.command"]
        command = [python, *how, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    return run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    write(file, PASSAGES)
    return file


def write(file: Path, count: int) -> None:
    topics = ["rivers", "stars", "bridges", "birds", "languages", "metals", "islands"]
    with file.open("w") as lines:
        for n in range(count):
            topic = topics[n % len(topics)]
            row: dict[str, Any] = {"id": f"passage-{n}", "contents": f'"{topic} {n}"\nNumber {n} is about {topic}.'}
            lines.write(json.dumps(row | {"topic": topic}) + "\n")


def answers(folder: Path, repository: Path) -> Iterator[list[tuple[str, float]]]:
    settings = RetrieverSettings(index=folder, cache_dir=repository / ".cache/retriever", nprobe=2)
    found = load.load_index(Path("unused"), settings, lambda what: None)
    for query in ("birds", "bridges 16", "which islands are there?", "Number 42"):
        for mode in found.searchers:
            hits = found.searchers[mode].search([query], 10, (("topic", ("birds", "bridges", "islands")),))[0]
            yield [(found.corpus.ids[hit.row], hit.score) for hit in hits]


def test_a_build_that_is_killed_anywhere_goes_on_and_gives_the_identical_index(
    index: Run, corpus: Path, tmp_path: Path, repository: Path
) -> None:
    options = ["--corpus", corpus, "-f", "IVF4,SQ8", "--vectors", "float16", "--filter-field", "topic"]
    undisturbed = index("build", "whole", *options)
    assert undisturbed.returncode == 0, undisturbed.stderr
    for place in ("reading", "indexing words", "second part", "checkpoint", "trained", "writing", "in place"):
        killed = index(place, "build", "killed", *options, script=KILLED)
        assert killed.returncode == -signal.SIGKILL, (place, killed.stderr)
    resumed = index("build", "killed", *options)
    assert resumed.returncode == 0, resumed.stderr
    kept = {name: manifest.read_manifest(tmp_path / name) for name in ("whole", "killed")}
    # tantivy names its files by chance; what they hold is compared by what they answer.
    files = {
        name: {path: entry for path, entry in one.files.items() if not path.startswith("bm25/")}
        for name, one in kept.items()
    }
    assert {"corpus/rows.bin", "dense/index.faiss", "dense/vectors.npy"} <= set(files["whole"])
    assert files["killed"] == files["whole"]
    assert kept["killed"].model_copy(update={"files": {}}) == kept["whole"].model_copy(update={"files": {}})
    for name, one in kept.items():
        assert manifest.check_files(tmp_path / name, one) == []
    assert list(answers(tmp_path / "killed", repository)) == list(answers(tmp_path / "whole", repository))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "killed", "whole"]


def test_work_that_was_done_before_a_kill_is_not_done_again(index: Run, corpus: Path, tmp_path: Path) -> None:
    options = ["--corpus", corpus, "-f", "Flat"]
    assert index("writing", "build", "first", *options, script=KILLED).returncode == -signal.SIGKILL
    made = {
        name: (tmp_path / ".first.building/index" / name).stat().st_mtime_ns
        for name in ("corpus/rows.bin", "bm25/meta.json")
    }
    resumed = index("build", "first", *options)
    assert resumed.returncode == 0
    assert {name: (tmp_path / "first" / name).stat().st_mtime_ns for name in made} == made
    assert "indexing vectors" in resumed.stderr
    assert "encoding" not in resumed.stderr


def test_an_index_is_shown_checked_and_converted(index: Run, corpus: Path, tmp_path: Path) -> None:
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


def test_shards_are_cut_and_shown_one_by_one(index: Run, corpus: Path) -> None:
    cut = index("build", "cut", "--corpus", corpus, "--mode", "bm25", "--shards", "3")
    assert cut.returncode == 0, cut.stderr
    assert [f"shard-{n}" in cut.stdout for n in range(4)] == [True, True, True, False]
    assert index("verify", "cut").stdout.count("files are as they were built") == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["build", "out", "--corpus", "absent.jsonl", "--mode", "bm25"], "corpus absent.jsonl cannot be read"),
        (["build", "out", "--corpus", "corpus.jsonl", "-f", "Flatt"], "faiss_factory 'Flatt' is not an index"),
        (["build", "out", "--corpus", "corpus.jsonl", "--vectors", "int4"], "--vectors is 'int4': give auto, none"),
        (["build", "out", "retriever.mod=bm25"], "unknown setting 'retriever.mod'"),
        (["build", "taken", "--corpus", "corpus.jsonl", "--mode", "bm25"], "taken is no index"),
        (["convert", "new", "-f", "SQ8"], "convert takes OLD NEW"),
        (["convert", "old", "taken", "-f", "SQ8"], "taken is there already"),
        (["convert", "old", "new", "-f", "SQ8"], "old is no index"),
        (["convert", "new", "--faiss", "corpus.jsonl", "--corpus", "corpus.jsonl"], "corpus.jsonl cannot be read"),
        (["inspect", "absent"], "absent is no index"),
        (["verify", "taken"], "taken is no index"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(
    index: Run, corpus: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("")
    done = index(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "taken"]


def test_another_index_is_not_written_over_and_the_same_is_not_built_again(index: Run, corpus: Path) -> None:
    options = ["--corpus", corpus, "--mode", "bm25"]
    assert index("build", "one", *options).returncode == 0
    assert index("build", "one", *options).returncode == 0
    other = index("build", "one", *options, "--filter-field", "topic")
    assert other.returncode == 2
    assert "one is there already and is another index" in other.stderr


MEASURED = """
import pathlib, re, sys
from forage_retriever.command.main import main
sys.argv = ["forage index", *sys.argv[1:]]
try:
    main()
finally:
    # Not getrusage, whose peak is also that of the process that started this one.
    print("peak", re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
"""


def test_a_large_corpus_is_built_in_little_memory(index: Run, tmp_path: Path) -> None:
    write(tmp_path / "large.jsonl", 200_000)
    options = ["--corpus", "large.jsonl", "--mode", "bm25", "--filter-field", "topic"]
    done = index("build", "large", *options, script=MEASURED)
    assert manifest.read_manifest(tmp_path / "large").passages == 200_000
    # The libraries take 70 MB, tantivy's buffer 64, what is mapped of the files 50; as Python objects the passages
    # would take 100 more.
    assert int(done.stdout.rpartition("peak ")[2]) * 1024 < 230_000_000
