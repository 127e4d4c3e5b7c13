"""The result of a search: rows of the corpus with scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias


class Hit(NamedTuple):
    """A found passage: its row in the corpus and its score; higher is better."""

    row: int
    score: float


Filters: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
"""Fields of the corpus and the accepted values of each, both sorted; a passage must pass every filter."""


ROUNDING = 1e-6
"""Scores of BM25 that differ by no more, relatively, are equal but for the order of sums in single precision."""


def sort_scores(scores: Sequence[float]) -> list[int]:
    """Places of scores, best first; those that differ from the one before by rounding at most keep their order."""
    places = sorted(range(len(scores)), key=lambda place: -scores[place])
    ordered: list[int] = []
    begin = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or scores[places[end - 1]] - scores[places[end]] > ROUNDING * abs(scores[places[end]]):
            ordered += sorted(places[begin:end])
            begin = end
    return ordered


class Searcher(Protocol):
    """Searches a corpus. Thread-safe; other queries of a call change the scores of a query by rounding at most."""

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        """At most `topk` hits per query, best first; none for a query without searchable text."""
        ...


@dataclass(frozen=True)
class Provenance:
    """The origin of an answer, as SHA-256 digests; `encoder` is "" where there is none."""

    corpus: str
    encoder: str
    index: str
    mode: str
