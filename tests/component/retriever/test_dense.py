"""Texts are found by their meaning: the real encoder, and an index of its vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forage_retriever.corpus.columns import UnknownFieldError
from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders.encoder import Encoder, Vectors
from forage_retriever.hits import Hit
from forage_retriever.search import faiss_build
from forage_retriever.search.dense import DenseIndex
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrieverSettings


def write(folder: Path, vectors: Vectors) -> None:
    index = faiss_build.create_index("Flat", vectors.shape[1])
    faiss_build.add_vectors(index, "Flat", vectors)
    faiss_build.write_index(index, folder / faiss_build.INDEX_FILE)


@pytest.fixture
def dense(tmp_path: Path, texts: Corpus, encoder: Encoder) -> DenseIndex:
    write(tmp_path, encoder.encode_passages(texts.contents[:], lambda done: None))
    return DenseIndex(tmp_path, encoder, texts.columns, RetrieverSettings())


def test_a_dense_index_finds_by_meaning_and_something_for_blank_queries(dense: DenseIndex, texts: Corpus) -> None:
    rankings = dense.search(["Norwegian money", "", " \n", "Kandy"], 2)
    assert [len(hits) for hits in rankings] == [2, 2, 2, 2]
    assert [texts.ids[rankings[place][0].row] for place in (0, 3)] == ["n", "k"]
    # As Search-R1's server does: the passages nearest to the vector of the empty text.
    scores, rows = dense.vectors.search(dense.encoder.encode_queries([""]), 2)
    assert rankings[1] == [Hit(*hit) for hit in zip(rows[0].tolist(), scores[0].tolist(), strict=True)]
    assert dense.search([], 2) == []


def test_a_dense_index_finds_only_passages_that_pass_its_filters(dense: DenseIndex, texts: Corpus) -> None:
    rankings = dense.search(["Norway", "Benin"], 3, (("lang", ("fr", "nb")),))
    assert [[texts.ids[hit.row] for hit in hits] for hits in rankings] == [["o", "7"], ["7", "o"]]
    with pytest.raises(UnknownFieldError, match="'colour'"):
        dense.search(["Norway"], 3, (("colour", ("red",)),))


def test_an_encoder_of_another_dimension_is_refused(tmp_path: Path, texts: Corpus, encoder: Encoder) -> None:
    write(tmp_path, np.zeros((6, 32), np.float32))
    with pytest.raises(UserError, match="32 dimensions, the encoder's have 384"):
        DenseIndex(tmp_path, encoder, texts.columns, RetrieverSettings())
