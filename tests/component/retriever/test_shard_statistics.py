"""Shards score BM25 by the statistics of the whole corpus, so that their merged rankings are those of one index."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from retriever_parts import list_ids
from retriever_servers import serve_merger, serve_shard

from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index import load, manifest
from forage_retriever.index.build import build_index
from forage_retriever.index.load import Index
from forage_retriever.index.recipe import Recipe
from forage_retriever.search import bm25, corpus_statistics
from forage_retriever.search.corpus_statistics import CorpusStatistics, StatisticsWriter
from forage_runtime.errors import DataError
from forage_runtime.settings import RetrievalMode, RetrieverSettings

pytestmark = pytest.mark.usefixtures("patient_front")

SHARDS = 3
CHANCE = random.Random(1)
WORDS = [f"{a}{b}{c}{d}k" for a in "bdgz" for b in "aou" for c in "lmrt" for d in "aou"]
"""A stemmer leaves them as they are."""


def draw_words(count: int) -> list[str]:
    """Frequent words, and rare ones."""
    return [WORDS[int(len(WORDS) * CHANCE.random() ** 2.5)] for _ in range(count)]


def make_rows() -> list[tuple[str, str]]:
    """Titles and texts: passages become longer and change their words, and every ninth is one of before."""
    rows: list[tuple[str, str]] = []
    for number in range(240):
        own = WORDS[-1 - number // 80]  # of its third of the corpus, nearly
        rows.append((" ".join(draw_words(2)), " ".join([*draw_words(10 + number // 3), own])))
        if number % 9 == 8:
            rows[number] = rows[CHANCE.randrange(number)]
    return rows


ROWS = make_rows()
QUERIES = [" ".join(draw_words(CHANCE.randint(1, 6))) for _ in range(70)] + [title for title, _ in ROWS[::8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    lines = [json.dumps({"id": str(row), "contents": f'"{one[0]}"\n{one[1]}'}) for row, one in enumerate(ROWS)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    (folder / "few.jsonl").write_text("\n".join(lines[:60]))  # encoding takes its time
    return folder


@pytest.fixture(scope="module")
def build(folder: Path, encoder: Encoder) -> Callable[..., list[Index]]:
    """Builds the corpus as so many indexes, and loads them; `change` gets the folder before."""

    def begin(
        name: str,
        shards: int,
        mode: RetrievalMode = RetrievalMode.BM25,
        change: Callable[[Path], None] = lambda _: None,
    ) -> list[Index]:
        settings = RetrieverSettings(mode=mode)
        used = None if mode is RetrievalMode.BM25 else encoder
        recipe, corpus = (
            Recipe.from_settings(settings, used),
            folder / ("corpus.jsonl" if used is None else "few.jsonl"),
        )
        build_index(folder / name, folder / f".{name}", corpus, recipe, lambda *_: None, shards)
        change(folder / name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load.recipe, "load_encoder", lambda *_, **__: used)
            return [
                load.load_index(corpus, settings.model_copy(update={"index": one}), lambda _: None)
                for one in manifest.list_shards(folder / name) or [folder / name]
            ]

    return begin


@pytest.fixture(scope="module")
def whole(build: Callable[..., list[Index]]) -> Index:
    return build("whole", 1)[0]


@pytest.fixture(scope="module")
def parts(build: Callable[..., list[Index]]) -> list[Index]:
    return build("parts", SHARDS)


def search_ids(index: Index, query: str, topk: int, mode: str = "bm25") -> list[str]:
    return [index.corpus.ids[hit.row] for hit in index.searchers[mode].search([query], topk)[0]]


def quantize(length: int) -> int:
    """A length as one byte keeps it: exact below 40, then four bits of it."""
    if length < 40:
        return length
    shift = (length - 24).bit_length() - 4
    return 24 + ((length - 24) >> shift << shift)


def score_by_hand(query: str) -> np.ndarray:
    """BM25 of every passage by its textbook (k1 = 1.2, b = 0.75), with the weights of titles."""
    scores = np.zeros(len(ROWS))
    fields = {"title": [title.split() for title, _ in ROWS], "text": [f"{a} {b}".split() for a, b in ROWS]}
    for field, weight in (("title", bm25.TITLE_BOOST), ("text", 1.0)):
        counts = [Counter(words) for words in fields[field]]
        mean = sum(map(len, fields[field])) / len(ROWS)
        for word in dict.fromkeys(query.split()):
            having = sum(word in own for own in counts)
            idf = math.log(1 + (len(ROWS) - having + 0.5) / (having + 0.5))
            for row, own in enumerate(counts):
                norm = 1.2 * (0.25 + 0.75 * quantize(len(fields[field][row])) / mean)
                scores[row] += weight * idf * 2.2 * own[word] / (own[word] + norm)
    return scores + np.array([bm25.EXACT_TITLE_SCORE * (title == query) for title, _ in ROWS])


async def test_merged_shards_rank_as_one_index_does_and_as_the_formula_says(
    whole: Index, parts: list[Index], free_address: Callable[[], str]
) -> None:
    addresses = [free_address() for _ in parts]
    async with AsyncExitStack() as servers:
        for part, address in zip(parts, addresses, strict=True):
            await servers.enter_async_context(serve_shard(part, address))
        front = await servers.enter_async_context(serve_merger(*addresses))
        results = await front.retrieve(QUERIES, 10)
        titles = await front.retrieve(QUERIES, 10, mode="title")
    assert list_ids(results) == [search_ids(whole, query, 10) for query in QUERIES]
    assert list_ids(titles) == [search_ids(whole, query, 10, "title") for query in QUERIES]
    assert any(len(ids) > 1 for ids in list_ids(titles)), "titles of several shards are equal"
    for query, result in zip(QUERIES, results.per_query, strict=True):
        expected = score_by_hand(query)
        rows = [int(result.passages.ids[hit.row]) for hit in result.hits]
        assert [hit.score for hit in result.hits] == pytest.approx(expected[rows].tolist(), rel=1e-5)
        best = np.sort(expected)[::-1][: len(rows)]
        assert expected[rows].tolist() == pytest.approx(best.tolist(), rel=1e-5)


async def test_without_a_shard_the_others_rank_as_before(
    whole: Index, parts: list[Index], free_address: Callable[[], str]
) -> None:
    addresses = [free_address() for _ in parts]
    async with AsyncExitStack() as servers:
        async with AsyncExitStack() as mortal:
            for part, address in zip(parts, addresses, strict=True):
                stack = mortal if part is parts[1] else servers
                await stack.enter_async_context(serve_shard(part, address))
            front = await servers.enter_async_context(serve_merger(*addresses))
        results = await front.retrieve(QUERIES, 5)
    assert results.partial
    lost = set(parts[1].corpus.ids)
    for query, ids in zip(QUERIES, list_ids(results), strict=True):
        everything = search_ids(whole, query, len(ROWS))
        assert ids == [id for id in everything if id not in lost][:5]


async def test_hybrid_rankings_of_shards_are_those_of_one_index(
    build: Callable[..., list[Index]], free_address: Callable[[], str]
) -> None:
    (whole,), parts = build("hybrid", 1, RetrievalMode.HYBRID), build("hybrids", SHARDS, RetrievalMode.HYBRID)
    addresses = [free_address() for _ in parts]
    async with AsyncExitStack() as servers:
        for part, address in zip(parts, addresses, strict=True):
            await servers.enter_async_context(serve_shard(part, address))
        front = await servers.enter_async_context(serve_merger(*addresses, mode=RetrievalMode.HYBRID))
        # One at a time: a query's vector depends, by rounding, on those that are encoded with it.
        results = [list_ids(await front.retrieve([query], 5))[0] for query in QUERIES[::9]]
    assert results == [search_ids(whole, query, 5, "hybrid") for query in QUERIES[::9]]


def test_shards_without_statistics_are_served_with_a_warning(
    whole: Index, parts: list[Index], build: Callable[..., list[Index]], capsys: pytest.CaptureFixture[str]
) -> None:
    def forget(index: Path) -> None:
        for shard in manifest.list_shards(index):
            shutil.rmtree(shard / "bm25" / corpus_statistics.FOLDER)
            known = manifest.read_manifest(shard)
            files = {name: entry for name, entry in known.files.items() if corpus_statistics.FOLDER not in name}
            manifest.write_manifest(shard, known.model_copy(update={"files": files}))

    old = build("old", SHARDS, change=forget)
    assert capsys.readouterr().err.count("shard_scores_by_itself") == SHARDS
    scores = [one.searchers["bm25"].search([WORDS[-1]], 1)[0][0].score for one in (whole, parts[0], old[0])]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert scores[2] != pytest.approx(scores[0], rel=1e-2)


def test_damaged_statistics_name_their_folder(folder: Path, parts: list[Index], tmp_path: Path) -> None:
    shutil.copytree(folder / "parts/shard-0/bm25/statistics", tmp_path / "statistics")
    (tmp_path / "statistics/counts.json").write_text('{"digest": "", "parts": [3]}')
    with pytest.raises(DataError, match=r"statistics .* cannot be read"):
        CorpusStatistics(tmp_path / "statistics")


def test_an_interrupted_count_is_the_same_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {}
    for name, held in (("many", 2**20), ("few", 7)):
        monkeypatch.setattr(corpus_statistics, "_HELD_WORDS", held)
        writer = StatisticsWriter()
        for title, text in ROWS:
            writer.add_passage([title.split(), text.split()])
        writer.end_part()
        (tmp_path / name).mkdir()
        writer.write(tmp_path / name, "digest")
        statistics = CorpusStatistics(tmp_path / name)
        counted[name] = [statistics.count_passages("text", word) for word in (*WORDS, "unknown")]
    assert counted["many"] == counted["few"]
    assert counted["few"] == [sum(word in text.split() for _, text in ROWS) for word in (*WORDS, "unknown")]


@pytest.mark.parametrize("words", [(1, 1), (0, 40), (9, 100_000)])
@pytest.mark.parametrize("passages", [1, 7, 2_000_000])
def test_padding_makes_the_mean_length_of_a_shard_that_of_the_corpus(
    tmp_path: Path, words: tuple[int, int], passages: int
) -> None:
    parts = [
        corpus_statistics.PassageBlock(passages, words),
        corpus_statistics.PassageBlock(3_000_001, (9_000_017, 300_000_123)),
    ]
    counts = {"digest": "", "parts": [part._asdict() for part in parts]}
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    for field in corpus_statistics.FIELDS:
        for kind in ("words", "passages"):
            np.save(tmp_path / f"{field}-{kind}.npy", np.empty(0, np.uint64))
    statistics = CorpusStatistics(tmp_path)
    assert statistics.count_passages("text", "nothing") == 0
    for number, part in enumerate(parts):
        padding = statistics.plan_padding(number)
        for total, own, more in zip(statistics.whole.words, part.words, padding.words, strict=True):
            assert more >= 0
            mean = (own + more) / (part.passages + padding.documents)
            assert mean == pytest.approx(total / statistics.whole.passages, rel=3e-6)


def test_the_digest_of_a_shard_names_the_corpus_that_it_is_a_part_of(folder: Path, parts: list[Index]) -> None:
    descriptions = [manifest.read_manifest(one) for one in manifest.list_shards(folder / "parts")]
    assert len({one.compute_digest(RetrievalMode.BM25) for one in descriptions}) == SHARDS
    assert [one.shard.number for one in descriptions if one.shard] == list(range(SHARDS))
    assert not (folder / ".parts").exists()
    assert replace(parts[0].provenance, index="") != replace(parts[1].provenance, index="")
