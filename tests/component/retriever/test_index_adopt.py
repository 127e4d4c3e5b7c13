"""FAISS files of others are adopted with their corpus, whole and cut; wrong rows are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from forage_retriever.encoders.encoder import Encoder, Vectors
from forage_retriever.index import agreement, load, manifest
from forage_retriever.index.adopt import adopt_index
from forage_retriever.index.agreement import BLOCKS, EDGE, choose_rows, find_wrong_rows
from forage_retriever.index.building.shards import Processes
from forage_retriever.index.recipe import Recipe
from forage_runtime.errors import DataError, UserError
from forage_runtime.settings import RetrievalMode, RetrieverSettings

TOPICS = [
    "Oslo",
    "tea",
    "copper",
    "bridges",
    "a violin",
    "the moon",
    "chess",
    "whales",
    "glass",
    "rain",
    "salt",
]
VERBS = ["is older than", "was sold for", "is painted on", "came before", "costs more than", "is not"]
TEXTS = [f'"{a}"\n{a} {verb} {b}.' for a in TOPICS for b in TOPICS[:4] for verb in VERBS]

Adopt = Callable[..., Path]


class Remembering:
    """The real encoder, which encodes each text once."""

    def __init__(self, inner: Encoder) -> None:
        self._inner = inner
        self._known: dict[str, NDArray[np.float32]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts)

    def encode_passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> Vectors:
        progress(len(texts))
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> Vectors:
        """Queries and passages have no prefixes of their own here."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        self._known.update(zip(new, self._inner.encode_queries(new), strict=True))
        return np.stack([self._known[text] for text in texts])


@pytest.fixture(scope="module")
def remembering(encoder: Encoder) -> Remembering:
    assert encoder.convention.query_prefix == encoder.convention.passage_prefix == ""
    return Remembering(encoder)


@pytest.fixture(scope="module")
def vectors(remembering: Remembering) -> Vectors:
    return remembering.encode_passages(TEXTS, lambda done: None)


@pytest.fixture
def adopt(remembering: Remembering, tmp_path: Path) -> Adopt:
    """Adopts vectors [n, d] as an index of a type: `adopt("name", vectors, "SQ8", shards=2)`."""
    corpus = tmp_path / "corpus.jsonl"
    settings = RetrieverSettings(cache_dir=tmp_path / "cache", mode=RetrievalMode.DENSE)

    def begin(
        name: str,
        vectors: NDArray[Any],
        kind: str = "Flat",
        metric: int = faiss.METRIC_INNER_PRODUCT,
        shards: int = 1,
        ids: Sequence[int] | None = None,
        passages: int = len(TEXTS),
    ) -> Path:
        lines = [json.dumps({"id": f"id-{n}", "contents": text}) + "\n" for n, text in enumerate(TEXTS[:passages])]
        corpus.write_text("".join(lines))
        index = faiss.index_factory(vectors.shape[1], kind, metric)
        index.train(vectors[np.isfinite(vectors).all(axis=1)])
        if ids is None:
            index.add(vectors)
        else:
            index.add_with_ids(vectors, np.asarray(ids, np.int64))
        file = tmp_path / f"{name}.faiss"
        faiss.write_index(index, str(file))
        recipe, processes = Recipe.from_settings(settings, remembering), Processes(1, settings)
        adopt_index(tmp_path / name, tmp_path / f".{name}", file, corpus, recipe, lambda *_: None, shards, processes)
        return tmp_path / name

    return begin


def test_a_file_is_adopted_with_its_corpus(
    adopt: Adopt, vectors: Vectors, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adopt("good", vectors)
    monkeypatch.setattr(load.recipe, "load_encoder", lambda *_, **__: encoder)
    index = load.load_index(Path("unused"), RetrieverSettings(index=folder, mode=RetrievalMode.DENSE), lambda _: None)
    hits = index.searcher.search([TEXTS[100]], 1)[0]
    assert index.corpus.contents[hits[0].row] == TEXTS[100]
    with pytest.raises(DataError, match=f"holds {len(TEXTS) - 1} vectors and the corpus {len(TEXTS)} passages"):
        adopt("short", vectors[:-1])
    with pytest.raises(UserError, match=r"holds vectors of 100 numbers, the encoder gives 384: set retriever.encoder"):
        adopt("narrow", np.ascontiguousarray(vectors[:, :100]))
    with pytest.raises(UserError, match="ranks by distance"):
        adopt("far", vectors, metric=faiss.METRIC_L2)
    assert not list(tmp_path.glob(".*")), "nothing is left of what was refused"


@pytest.mark.parametrize(
    "kind", ["SQ8", "SQfp16", "HNSW8", "PQ96x4np", "IVF4,Flat", "IVF4,SQ8", "IVF4,PQ48x4np", "PCA64,SQ8"]
)
def test_other_types_and_precisions_agree_and_reversed_rows_do_not(adopt: Adopt, vectors: Vectors, kind: str) -> None:
    rounded = vectors.astype(np.float16).astype(np.float32)
    assert manifest.read_manifest(adopt("good", rounded, kind)).passages == len(TEXTS)
    turned = vectors.copy()
    turned[96:192] = turned[96:192][::-1]
    with pytest.raises(DataError, match=r"not those of the corpus .*: row \d+ "):
        adopt("turned", turned, kind)


def test_types_that_give_no_vectors_back_are_searched(adopt: Adopt, vectors: Vectors) -> None:
    assert adopt("good", vectors, "IVF4,PQ96x4fs").exists()
    turned = np.concatenate([vectors[:168], vectors[168:][::-1]])
    with pytest.raises(DataError, match=r"sampled passages are not among the 27 nearest of their own text"):
        adopt("turned", turned, "IVF4,PQ96x4fs")


@pytest.mark.parametrize("kind", ["IDMap,Flat", "IDMap2,Flat", "IDMap,IVF4,PQ96x4fs", "PCA32,IDMap,Flat"])
@pytest.mark.parametrize("passages", [60, len(TEXTS)])
def test_a_map_of_ids_is_refused(adopt: Adopt, vectors: Vectors, kind: str, passages: int) -> None:
    for ids in (range(1000, 1000 + passages), range(passages)[::-1], range(passages)):
        with pytest.raises(UserError, match=r"maps its rows to ids of its own \(IndexIDMap\), expected row n to be"):
            adopt("mapped", vectors[:passages], kind, ids=ids, passages=passages)


@pytest.mark.parametrize("kind", ["IVF4,Flat", "IVF4,SQ8", "IVF4,PQ96x4fs", "PCA32,IVF4,Flat"])
@pytest.mark.parametrize("passages", [60, len(TEXTS)])
def test_ids_in_lists_are_those_of_the_passages(adopt: Adopt, vectors: Vectors, kind: str, passages: int) -> None:
    turned = np.ascontiguousarray(vectors[:passages][::-1])
    given = adopt("turned", turned, kind, ids=range(passages)[::-1], passages=passages)
    assert manifest.read_manifest(given).passages == passages
    with pytest.raises(DataError, match=rf"ids of its own: {passages} of the numbers from 0 to {passages - 1} are not"):
        adopt("far", turned, kind, ids=range(1000, 1000 + passages), passages=passages)
    with pytest.raises(DataError, match=r"ids of its own: 1 of the numbers"):
        adopt("twice", turned, kind, ids=[1, *range(1, passages)][::-1], passages=passages)
    with pytest.raises(DataError, match="are not those of the corpus under encoder"):
        adopt("wrong", turned, kind, ids=range(passages), passages=passages)


def test_two_rows_that_were_exchanged_are_named(adopt: Adopt, vectors: Vectors) -> None:
    changed = vectors.copy()
    changed[[17, 200]] = changed[[200, 17]]
    with pytest.raises(DataError, match=r"2 of 264 sampled rows differ, .* row 200 holds the vector of passage 17 "):
        adopt("exchanged", changed)


def test_a_row_of_another_text_or_length_is_named(adopt: Adopt, vectors: Vectors) -> None:
    changed = vectors.copy()
    changed[33] = -changed[33]
    with pytest.raises(DataError, match=r"1 of 264 sampled rows differ, .* row 33 agrees with passage 33 .* by -1"):
        adopt("mirrored", changed)
    changed[33] = -2 * changed[33]
    with pytest.raises(DataError, match=r"1 of 264 sampled rows differ, .* row 33 "):
        adopt("long", changed)


@pytest.mark.parametrize(
    ("kind", "value"), [("Flat", np.nan), ("SQfp16", np.inf), ("HNSW8", -np.inf), ("Flat", np.inf)]
)
def test_what_is_not_finite_is_refused_with_its_row(
    adopt: Adopt, vectors: Vectors, monkeypatch: pytest.MonkeyPatch, kind: str, value: float
) -> None:
    monkeypatch.setattr(agreement, "choose_rows", lambda count, chance: np.arange(3))  # the row is not in the sample
    changed = vectors.copy()
    changed[250, 7] = value
    with pytest.raises(DataError, match=rf"holds {value} in row 250 \(rows count from 0\)"):
        adopt("odd", changed, kind)


@pytest.mark.parametrize("kind", ["Flat", "SQ8"])
def test_a_flat_file_is_cut_into_shards(adopt: Adopt, vectors: Vectors, kind: str, tmp_path: Path) -> None:
    folders = manifest.list_shards(adopt("cut", vectors, kind, shards=3))
    whole = faiss.read_index(str(tmp_path / "cut.faiss"))
    parts = [faiss.read_index(str(folder / "dense/index.faiss")) for folder in folders]
    assert [part.ntotal for part in parts] == [88, 88, 88]
    assert np.array_equal(
        np.concatenate([part.reconstruct_n(0, 88) for part in parts]), whole.reconstruct_n(0, len(vectors))
    )
    for number, folder in enumerate(folders):
        kept = manifest.read_manifest(folder)
        assert kept.shard is not None
        assert (kept.shard.first, manifest.check_files(folder, kept)) == (88 * number, [])


@pytest.mark.parametrize("kind", ["IVF4,Flat", "HNSW8", "PQ96x4np"])
def test_a_file_that_cannot_be_cut_is_refused_with_what_works(adopt: Adopt, vectors: Vectors, kind: str) -> None:
    with pytest.raises(UserError, match=r"is of type Index\w+, .*: import it whole, without --shards, or build shards"):
        adopt("cut", vectors, kind, shards=2)


def test_one_wrong_row_in_a_hundred_is_found_with_the_probability_that_is_promised() -> None:
    chance = np.random.default_rng(1)
    count, found = 100_000, 0
    for _ in range(300):
        rows = choose_rows(count, chance)
        assert len(rows) <= BLOCKS + 2 * EDGE
        assert {0, EDGE - 1, count - EDGE, count - 1} <= set(rows.tolist())
        wrong = chance.permutation(count)[: count // 100]
        found += bool(np.isin(rows, wrong).any())
    assert found >= 290, "99 % of 300 are 297; with a probability of 1 in 10,000 fewer than 290 are found"
    begin = int(chance.integers(0, count - 2 * count // BLOCKS))
    piece = np.arange(begin, begin + 2 * count // BLOCKS + 1)
    assert all(np.isin(choose_rows(count, chance), piece).any() for _ in range(50))
    assert choose_rows(40, chance).tolist() == list(range(40))


def test_noise_of_precision_is_not_taken_for_another_text() -> None:
    chance = np.random.default_rng(2)
    # E5's vectors: those of unrelated texts have a cosine of 0.75 already.
    texts = (chance.standard_normal((468, 256)) + 1.7).astype(np.float32)
    for noise, coarse in ((0.0, False), (0.05, False), (0.3, False), (0.9, True)):
        stored = texts + noise * chance.standard_normal(texts.shape).astype(np.float32)
        assert find_wrong_rows(stored, texts, coarse).tolist() == [], noise
        stored[100:103] = stored[[101, 102, 100]]
        assert find_wrong_rows(stored, texts, coarse).tolist() == [100, 101, 102], noise
