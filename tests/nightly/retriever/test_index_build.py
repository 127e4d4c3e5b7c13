"""`forage index build` killed at every stage, and over a large corpus."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from index_command import IndexCommand, write_topics

from forage_retriever.index import load, manifest
from forage_runtime.settings import RetrieverSettings

PASSAGES = 60

KILLED = """
import os, signal, sys
from forage_retriever.corpus import store
from forage_runtime.files import durable
from forage_retriever.command.main import main
from forage_retriever.index import workspace
from forage_retriever.index.building import dense_stages
from forage_retriever.search import bm25, faiss_build, faiss_stream, row_files, vectors

dense_stages.PART, row_files.CHECKPOINT_S = 16, 0.0
owner, name, count = {
    "reading": (store.CorpusWriter, "add_passage", 30),
    "indexing words": (bm25, "split_contents", 30),
    "second part": (vectors.VectorsWriter, "append", 2),
    "checkpoint": (durable, "write_atomically", 1),
    "trained": (faiss_stream, "encode_into_cells", 1),
    "sorting": (faiss_stream, "write_inverted", 1),
    "writing": (faiss_build, "write_index", 1),
    "flat": (faiss_stream, "write_flat", 1),
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
"""Kills itself before the n-th call of a function."""


@pytest.fixture
def index(repository: Path, tmp_path: Path) -> IndexCommand:
    return IndexCommand(repository, tmp_path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    write_topics(file, PASSAGES)
    return file


def iterate_answers(folder: Path, repository: Path) -> Iterator[list[tuple[str, float]]]:
    settings = RetrieverSettings(index=folder, cache_dir=repository / ".cache/retriever", nprobe=2)
    index = load.load_index(Path("unused"), settings, lambda what: None)
    for query in ("birds", "bridges 16", "which islands are there?", "Number 42"):
        for mode in index.searchers:
            hits = index.searchers[mode].search([query], 10, (("topic", ("birds", "bridges", "islands")),))[0]
            yield [(index.corpus.ids[hit.row], hit.score) for hit in hits]


def test_a_build_killed_at_any_stage_resumes_to_the_identical_index(
    index: IndexCommand, corpus: Path, tmp_path: Path, repository: Path
) -> None:
    options = ["--corpus", corpus, "-f", "IVF4,SQ8", "--vectors", "float16", "--filter-field", "topic"]
    undisturbed = index("build", "whole", *options)
    assert undisturbed.returncode == 0, undisturbed.stderr
    for place in (
        "reading",
        "indexing words",
        "second part",
        "checkpoint",
        "writing",
        "trained",
        "sorting",
        "in place",
    ):
        killed = index(place, "build", "killed", *options, script=KILLED)
        assert killed.returncode == -signal.SIGKILL, (place, killed.stderr)
    resumed = index("build", "killed", *options)
    assert resumed.returncode == 0, resumed.stderr
    kept = {name: manifest.read_manifest(tmp_path / name) for name in ("whole", "killed")}
    # tantivy names its files randomly; their content is compared by search results.
    files = {
        name: {path: entry for path, entry in one.files.items() if not path.startswith("bm25/")}
        for name, one in kept.items()
    }
    assert {"corpus/rows.bin", "dense/index.faiss", "dense/vectors.npy"} <= set(files["whole"])
    assert files["killed"] == files["whole"]
    assert kept["killed"].model_copy(update={"files": {}}) == kept["whole"].model_copy(update={"files": {}})
    for name, one in kept.items():
        assert manifest.check_files(tmp_path / name, one) == []
    assert list(iterate_answers(tmp_path / "killed", repository)) == list(
        iterate_answers(tmp_path / "whole", repository)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "killed", "whole"]


def test_stages_finished_before_a_kill_are_not_repeated(index: IndexCommand, corpus: Path, tmp_path: Path) -> None:
    options = ["--corpus", corpus, "-f", "Flat"]
    assert index("flat", "build", "first", *options, script=KILLED).returncode == -signal.SIGKILL
    build_times = {
        name: (tmp_path / ".first.building/index" / name).stat().st_mtime_ns
        for name in ("corpus/rows.bin", "bm25/meta.json")
    }
    resumed = index("build", "first", *options)
    assert resumed.returncode == 0
    assert {name: (tmp_path / "first" / name).stat().st_mtime_ns for name in build_times} == build_times
    assert "indexing vectors" in resumed.stderr
    assert "encoding" not in resumed.stderr.replace("encoding passages (3 of", "")


INTERRUPTED = """
import os, signal, sys, threading, time
from forage_retriever.command.main import main
from forage_retriever.index.building import dense_stages
from forage_retriever.search import row_files

dense_stages.PART, row_files.CHECKPOINT_S = 8, 0.0

def kill():
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
sys.argv = ["forage index", *sys.argv[2:]]
main()
"""
"""Kills itself after some seconds."""


def test_shards_killed_at_random_moments_resume_to_the_identical_indexes(
    index: IndexCommand, corpus: Path, tmp_path: Path
) -> None:
    options = ["--corpus", corpus, "-f", "IVF2,SQ8", "--mode", "dense", "--shards", "2", "--jobs", "1"]
    chance = random.Random(0)
    began = time.monotonic()
    assert index("build", "whole", *options).returncode == 0
    took = time.monotonic() - began
    moments = sorted(chance.uniform(0, 0.8 * took) for _ in range(5))  # the first ones before any build can have ended
    ends = [index(str(moment), "build", "killed", *options, script=INTERRUPTED) for moment in moments]
    assert -signal.SIGKILL in {end.returncode for end in ends}
    assert index("build", "killed", *options).returncode == 0
    for number in range(2):
        whole, killed = (manifest.read_manifest(tmp_path / name / f"shard-{number}") for name in ("whole", "killed"))
        assert killed == whole
        assert manifest.check_files(tmp_path / f"killed/shard-{number}", killed) == []


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


def test_a_large_corpus_is_indexed_in_bounded_memory(index: IndexCommand, tmp_path: Path) -> None:
    write_topics(tmp_path / "large.jsonl", 200_000)
    options = ["--corpus", "large.jsonl", "--mode", "bm25", "--filter-field", "topic"]
    done = index("build", "large", *options, script=MEASURED)
    assert manifest.read_manifest(tmp_path / "large").passages == 200_000
    # The libraries take 70 MB, tantivy's buffer 64, what is mapped of the files 50; as Python objects the passages
    # would take 100 more.
    assert int(done.stdout.rpartition("peak ")[2]) * 1024 < 230_000_000
