"""What a search gives: rows of the corpus with scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias


class Hit(NamedTuple):
    """A passage that was found: its row in the corpus, and a score of which higher is better."""

    row: int
    score: float


Filters: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
"""Fields of the corpus and the values accepted in each, both sorted; a passage must pass all of them."""


class Searcher(Protocol):
    """A way to search. Thread-safe, and neighbours change a query's scores by rounding at most."""

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        """At most `topk` hits a query, best first; none for a query in which there is nothing to look for."""
        ...


@dataclass(frozen=True)
class Provenance:
    """What answered, as SHA-256 digests; `encoder` is "" where there is none."""

    corpus: str
    encoder: str
    index: str
    mode: str
