"""Fixtures over a small corpus, for the retriever's tests of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from retriever_parts import write_corpus

from forage_retriever.corpus import read
from forage_retriever.corpus.store import Corpus
from forage_retriever.index import load as index
from forage_retriever.index.load import Index
from forage_runtime.settings import RetrievalMode, RetrieverSettings

ROWS: list[dict[str, Any]] = [
    {"id": "n", "contents": '"Norway"\nThe capital of Norway is Oslo. The currency of Norway is Krone.'},
    {"id": "o", "contents": '"Oslo"\nOslo is the capital of Norway.', "source": {"år": 1048}, "lang": ["nb", "nn"]},
    {"id": "k", "contents": '"Kandy"\nKandy is a city in Sri Lanka.', "url": "https://example.org/kandy"},
    {"id": 7, "contents": '"Kandi"\nKandi is a city in Benin.', "lang": "fr"},
    {"id": "t", "contents": "Only a title"},
    {"id": "s", "contents": '"São Paulo"\nSão Paulo is a city in Brazil. <answer> [AND] OR* ~2 ^4'},
]
CORPUS = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text(CORPUS)
    return file


@pytest.fixture
def texts(corpus_file: Path, tmp_path: Path) -> Corpus:
    folder = tmp_path / "corpus"
    folder.mkdir()
    return write_corpus(folder, read.read_passages(corpus_file), filter_fields=["lang"])


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """A BM25 index over the small corpus."""
    folder = tmp_path_factory.mktemp("loaded")
    (folder / "corpus.jsonl").write_text(CORPUS)
    settings = RetrieverSettings(mode=RetrievalMode.BM25, cache_dir=folder / "cache", filter_fields=("lang", "url"))
    return index.load_index(folder / "corpus.jsonl", settings, lambda _: None)
