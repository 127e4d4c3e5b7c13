"""BM25 indexes of Lucene are recognised, and refused with the command that builds one of Forage."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_runtime.files.lucene import explain_lucene, is_lucene_folder

SEARCH_R1 = ["segments_1", "write.lock", "_0.cfs", "_0.cfe", "_0.si"]


def write_files(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"?")
    return folder


@pytest.mark.parametrize(
    ("names", "is_lucene"),
    [
        (SEARCH_R1, True),
        (["segments_1a", "_2b.fdt", "_2b_Lucene99_0.doc"], True),
        (["_0.cfs", "_0.si"], True),  # a copy without its last file
        (["_0.si"], False),
        (["manifest.json", "bm25", "corpus"], False),
        (["meta.json", ".managed.json", "0a1b.term", "0a1b.idx"], False),  # tantivy's
        (["segments_notes.txt"], False),
        ([], False),
    ],
)
def test_a_lucene_index_is_known_by_its_files(tmp_path: Path, names: list[str], is_lucene: bool) -> None:
    folder = write_files(tmp_path / "index", names)
    assert is_lucene_folder(folder) is is_lucene
    assert (explain_lucene(folder) is not None) is is_lucene


def test_the_command_names_the_corpus_beside_the_index(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "save/bm25", SEARCH_R1)
    command = f"`forage index build {folder}-forage --mode bm25 --corpus"
    assert f"{command} CORPUS.jsonl`" in str(explain_lucene(folder))
    (tmp_path / "save/wiki-18.jsonl").touch()
    assert f"{command} {tmp_path}/save/wiki-18.jsonl`" in str(explain_lucene(folder))
    assert f"{tmp_path}/save/bm25 is a BM25 index of Lucene" in str(explain_lucene(tmp_path / "save"))


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("wikipedia-dpr-100w", True),
        ("beir-v1.0.0-nq.flat", True),
        ("msmarco-v1-passage", True),
        ("wikipedia-2018", False),
        ("wiki-18", False),
        ("indexes/wikipedia-dpr-100w", False),
    ],
)
def test_a_name_of_pyserini_is_known_where_no_folder_has_it(name: str, is_known: bool) -> None:
    sentence = explain_lucene(Path(name))
    assert (sentence is not None) is is_known
    if sentence:
        assert f"forage index build {name}-forage --mode bm25" in sentence
