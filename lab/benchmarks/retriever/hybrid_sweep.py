"""`make bench-hybrid`: which weights hybrid search should have by default.

Every set of questions (a source of FORAGE_BENCH_DATA, the world facts, and the titles of the world's passages, as a
policy searches for them) is cut in two: one half chooses, the other judges. The score is the mean over sets of nDCG@10.
Beside reciprocal rank fusion over weights, `rrf_k` and weights of exact titles it measures a convex combination of
scores (Bruch, Gai and Ingber, TOIS 2023), which the retriever does not have. Ends with one line of JSON. The first run
encodes each corpus once, which takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from questions import CACHE, Data, load_world
from questions import load as load_data
from rich.console import Console
from rich.table import Table

from forage_retriever.command.bench import open_index
from forage_retriever.command.evaluate import compute_metrics
from forage_retriever.command.fusion import (
    PARTS,
    TOPK,
    Fusion,
    Judged,
    bootstrap,
    choose_fusion,
    judge,
    list_fusions,
    score_fusion,
    score_ranking,
    split_questions,
)
from forage_retriever.command.questions import Question
from forage_retriever.corpus.read import split_contents
from forage_retriever.hits import Hit
from forage_retriever.index.load import Index
from forage_retriever.search.hybrid import choose_depth
from forage_runtime.settings import RetrievalMode, RetrieverSettings

DENSE_SHARES = tuple(round(0.05 * step, 2) for step in range(21))
TITLE_WEIGHTS = (0.0, 1.0, 2.0, 4.0, 8.0)
FORMER = Fusion(4.0, 2.0, 1.0, 60)
TITLES = 500
Rank = Callable[[Judged], list[int]]


@dataclass(frozen=True)
class Set:
    """Questions of one kind: the half that chooses, and the half that judges; `scored` has the same with scores."""

    name: str
    index: Index
    chooses: list[Judged]
    judges: list[Judged]
    scored: dict[str, tuple[list[Hit], list[Hit]]]


def main() -> None:
    console = Console()
    world = load_world()
    sets = _read_sets(world, _list_sources(world) | {"world titles": []})
    if os.environ.get("FORAGE_BENCH_DATA"):
        data = load_data()
        sets += _read_sets(data, _list_sources(data))
    present = Fusion.from_settings(RetrieverSettings())
    fusions = list_fusions()
    best = choose_fusion([own.chooses for own in sets], fusions)
    ranks: dict[str, Rank] = {
        "former": lambda one: FORMER.fuse(one.rankings),
        "default": lambda one: present.fuse(one.rankings),
        "best": lambda one: best.fuse(one.rankings),
        "bm25": lambda one: one.rankings[PARTS.index(RetrievalMode.BM25)],
        "dense": lambda one: one.rankings[PARTS.index(RetrievalMode.DENSE)],
    }
    share = max(DENSE_SHARES, key=lambda share: np.mean([_score_combined(own, own.chooses, share) for own in sets]))
    table, report = Table(title="nDCG@10 on held-out questions"), {}
    for title in ("set", "n", *ranks, "scores"):
        table.add_column(title, justify="left" if title == "set" else "right")
    for own in sets:
        row = {name: _score(own.judges, rank) for name, rank in ranks.items()}
        row["scores"] = _score_combined(own, own.judges, share)
        table.add_row(own.name, str(len(own.judges)), *(f"{value:.4f}" for value in row.values()))
        report[own.name] = {name: round(value, 5) for name, value in row.items()}
    names = [*ranks, "scores"]
    mean = {name: round(float(np.mean([row[name] for row in report.values()])), 5) for name in names}
    table.add_row("mean", "", *(f"{mean[name]:.4f}" for name in names))
    console.print(table)
    _print_grid(console, sets, fusions)
    judged = [one for own in sets for one in own.judges]
    against = {"former": FORMER, "best": best}
    gains = {name: score_fusion(judged, present) - score_fusion(judged, other) for name, other in against.items()}
    titles = {weight: _mean(sets, replace(present, title_weight=weight)) for weight in TITLE_WEIGHTS}
    quality = {name: _measure(sets, rank) for name, rank in ranks.items()}
    print(
        json.dumps(
            {
                "questions": len(judged),
                "default": vars(present),
                "best": vars(best),
                "dense_share_of_scores": share,
                "mean_ndcg": mean,
                "quality": quality,
                "gain_over": {name: [round(float(own.mean()), 5), *bootstrap(own)] for name, own in gains.items()},
                "title_weights": titles,
                "sets": report,
            }
        )
    )


def _read_sets(data: Data, sources: dict[str, list[Question]]) -> list[Set]:
    index = _open(data)
    if "world titles" in sources:
        sources["world titles"] = _list_titles(index)
    sets = []
    for name, questions in sources.items():
        halves = split_questions(questions)
        scored = {}
        for begin in range(0, len(questions), 64):
            texts = [question.text for question in questions[begin : begin + 64]]
            words, vectors = (index.searchers[part].search(texts, choose_depth(TOPK)) for part in PARTS[1:])
            scored |= dict(zip(texts, zip(words, vectors, strict=True), strict=True))
        sets.append(Set(name, index, judge(index, halves[0]), judge(index, halves[1]), scored))
    return sets


def _list_sources(data: Data) -> dict[str, list[Question]]:
    sources = defaultdict(list)
    for question in data.questions:
        sources[f"{data.name}: {question.source}" if question.source else data.name].append(question)
    return dict(sources)


def _list_titles(index: Index) -> list[Question]:
    """Titles as queries: what a policy that has learnt to search writes."""
    rows = np.random.default_rng(0).permutation(len(index.corpus))[:TITLES].tolist()
    return [
        Question(split_contents(index.corpus.contents[row])[0], frozenset({index.corpus.ids[row]}), "") for row in rows
    ]


def _open(data: Data) -> Index:
    cache = CACHE / "retriever"
    build = [sys.executable, Path(__file__).with_name("build_index.py"), data.corpus, f"retriever.cache_dir={cache}"]
    folder = subprocess.run(build, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout.splitlines()[
        -1
    ]
    return open_index(Path(folder), RetrieverSettings(cache_dir=cache))


def _score(judged: Sequence[Judged], rank: Rank) -> float:
    return float(np.mean([score_ranking(rank(one), one.gold, one.missing) for one in judged]))


def _mean(sets: Sequence[Set], fusion: Fusion) -> float:
    return round(float(np.mean([score_fusion(own.judges, fusion).mean() for own in sets])), 5)


def _score_combined(own: Set, judged: Sequence[Judged], share: float) -> float:
    return _score(judged, lambda one: _combine(own.scored[one.question.text], share, one.rankings[0]))


def _combine(rankings: tuple[list[Hit], list[Hit]], share: float, titles: Sequence[int]) -> list[int]:
    """The best rows by (1 - share) × BM25 + share × dense, each scaled to 0…1 over the ranking; exact titles first."""
    total: dict[int, float] = {row: 2.0 for row in titles}
    for hits, weight in zip(rankings, (1 - share, share), strict=True):
        low, high = (hits[-1].score, hits[0].score) if hits else (0.0, 0.0)
        for hit in hits:
            scaled = (hit.score - low) / (high - low) if high > low else 1.0
            total[hit.row] = total.get(hit.row, 0.0) + weight * scaled
    return sorted(total, key=lambda row: -total[row])[:TOPK]


def _print_grid(console: Console, sets: Sequence[Set], fusions: Sequence[Fusion]) -> None:
    """Means over sets, held-out: a row for each pair of weights, a column for each rrf_k."""
    constants = list(dict.fromkeys(fusion.rrf_k for fusion in fusions))
    table = Table("bm25 : dense", *map(str, constants), title="mean nDCG@10 by weights and rrf_k, held-out questions")
    for bm25, dense in dict.fromkeys((fusion.bm25_weight, fusion.dense_weight) for fusion in fusions):
        own = [fusion for fusion in fusions if (fusion.bm25_weight, fusion.dense_weight) == (bm25, dense)]
        table.add_row(f"{bm25:g} : {dense:g}", *(f"{_mean(sets, fusion):.4f}" for fusion in own))
    console.print(table)


def _measure(sets: Sequence[Set], rank: Rank) -> dict[str, float | None]:
    """hit@k over all held-out questions but the titles, and all@10 over those with several gold passages."""
    questions, ids = [], []
    for own in sets:
        if own.name == "world titles":
            continue
        questions += [one.question for one in own.judges]
        ids += [[own.index.corpus.ids[row] for row in rank(one)[:TOPK]] for one in own.judges]
    metrics = compute_metrics(questions, ids)
    return {name: metrics[name] and round(metrics[name], 4) for name in ("hit@1", "hit@3", "hit@10", "all@10", "mrr")}


if __name__ == "__main__":
    main()
