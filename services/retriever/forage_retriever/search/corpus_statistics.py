"""Statistics of a whole corpus, by which each of its shards scores BM25 as one index over everything does.

tantivy computes BM25 from the index that it searches: number of passages, mean length, and the passages that have a
word. A shard has the file of these numbers for the whole corpus. Its mean length is made the corpus's by padding, which
are documents without a row; the weights of words are corrected in each query by a factor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forage_runtime.errors import DataError
from forage_runtime.files import durable

RECIPE = "statistics/1"
FOLDER = "statistics"
FIELDS = ("title", "text")
"""The fields that BM25 scores."""

_COUNTS_FILE = "counts.json"
_HELD_WORDS = 2**20
"""Words of a field that are counted in memory before they join those of before, a number each."""

_TRIED = 20_000
"""Sizes of padding that are compared; in so many there is one that differs by rounding at most."""


_SAME_MEAN = 1.2e-7
"""Relative difference of two means that is one of rounding in single precision."""


class PassageBlock(NamedTuple):
    """Consecutive passages: how many, and the words in each of `FIELDS`."""

    passages: int
    words: tuple[int, ...]


class Padding(NamedTuple):
    """Documents to add to a shard, empty but for so many words in each of `FIELDS`."""

    documents: int
    words: tuple[int, ...]


class CorpusStatistics:
    """The statistics of a corpus, mapped into memory.

    Attributes:
        whole: the whole corpus.
        parts: its shards in order.
        digest: SHA-256 that names them.
    """

    def __init__(self, folder: Path) -> None:
        """Map the folder.

        Raises:
            DataError: it is damaged.
        """
        try:
            counts = json.loads((folder / _COUNTS_FILE).read_text(encoding="utf-8"))
            self.parts = [PassageBlock(one["passages"], tuple(one["words"])) for one in counts["parts"]]
            self.digest = str(counts["digest"])
            self._words: dict[str, NDArray[np.uint64]] = {}
            self._passages: dict[str, NDArray[np.uint32]] = {}
            for field in FIELDS:
                self._words[field], self._passages[field] = (
                    np.asarray(np.load(folder / name, mmap_mode="r")) for name in _name_files(field)
                )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"statistics {folder} cannot be read ({error}): delete this index, build it again"
            ) from None
        self._folder = folder
        totals = zip(*(part.words for part in self.parts), strict=True)
        self.whole = PassageBlock(sum(part.passages for part in self.parts), tuple(map(sum, totals)))

    def copy(self, folder: Path) -> None:
        """Write them to a new folder, as hard links where the file system has these."""
        folder.mkdir()
        for file in self._folder.iterdir():
            durable.link_or_copy(file, folder / file.name)

    def count_passages(self, field: str, word: str) -> int:
        """How many passages of the whole corpus have a word in a field."""
        known, number = self._words[field], np.uint64(_hash_word(word))
        place = int(known.searchsorted(number))
        return int(self._passages[field][place]) if place < len(known) and known[place] == number else 0

    def compute_factor(self, field: str, word: str, here: int, documents: int) -> float:
        """The weight of a word in the whole corpus, divided by that in a shard.

        Args:
            here: the passages of the shard that have the word.
            documents: of the shard, padding included.
        """
        local = _compute_idf(here, documents)
        # A word in nearly every passage of a large shard may have no weight there, which no factor changes.
        return _compute_idf(max(self.count_passages(field, word), here), self.whole.passages) / local if local else 1.0

    def plan_padding(self, number: int) -> Padding:
        """The smallest padding by which a shard's mean length of each field is that of the corpus."""
        part, whole = self.parts[number], self.whole
        means = [words / whole.passages for words in whole.words]
        least = [words / mean - part.passages for words, mean in zip(part.words, means, strict=True) if mean]
        begin = max(0, *(int(np.ceil(one)) for one in least)) if least else 0
        documents = np.arange(begin, begin + _TRIED)
        worst, added = np.zeros(_TRIED), []
        for words, total, mean in zip(part.words, whole.words, means, strict=True):
            more = np.maximum(np.rint(mean * (part.passages + documents)) - words, 0).astype(np.int64)
            more[documents == 0] = 0  # words need a document
            added.append(more)
            here = (words + more).astype(np.float32) / (part.passages + documents).astype(np.float32)
            want = np.float32(total) / np.float32(whole.passages)
            worst = np.maximum(worst, np.abs(here - want) / max(float(want), 1e-9))
        best = int(np.argmax(worst <= max(_SAME_MEAN, worst.min())))
        return Padding(int(documents[best]), tuple(int(more[best]) for more in added))


class StatisticsWriter:
    """Counts the words of a corpus, passage by passage, in bounded memory."""

    def __init__(self) -> None:
        self._counts = [_WordCounts() for _ in FIELDS]
        self._parts: list[PassageBlock] = []
        self._passages, self._totals = 0, [0] * len(FIELDS)

    def add_passage(self, words: Sequence[Sequence[str]]) -> None:
        """Count the words of the next passage in each of `FIELDS`."""
        self._passages += 1
        for place, own in enumerate(words):
            self._totals[place] += len(own)
            self._counts[place].add(set(own))

    def end_part(self) -> None:
        """The passages since the last call are one shard."""
        self._parts.append(PassageBlock(self._passages, tuple(self._totals)))
        self._passages, self._totals = 0, [0] * len(FIELDS)

    def write(self, folder: Path, digest: str) -> None:
        """Write everything to an existing folder; `digest` names what was counted."""
        for field, counts in zip(FIELDS, self._counts, strict=True):
            for name, numbers in zip(_name_files(field), counts.join(), strict=True):
                np.save(folder / name, numbers)
        parts = [part._asdict() for part in self._parts]
        (folder / _COUNTS_FILE).write_text(json.dumps({"digest": digest, "parts": parts}), encoding="utf-8")


class _WordCounts:
    """How many passages have each word. Beyond `_HELD_WORDS` a word is kept as a number of 64 bits: of ten million
    words, two have the same with a chance of 1 to 370,000, and their counts are added then."""

    def __init__(self) -> None:
        self._recent: Counter[str] = Counter()
        self._words: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._passages: NDArray[np.uint32] = np.empty(0, np.uint32)

    def add(self, words: Iterable[str]) -> None:
        self._recent.update(words)
        if len(self._recent) >= _HELD_WORDS:
            self.join()

    def join(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Words as sorted numbers, and the passages that have each."""
        new = np.fromiter(map(_hash_word, self._recent), np.uint64, len(self._recent))
        words = np.concatenate((self._words, new))
        passages = np.concatenate((self._passages, np.fromiter(self._recent.values(), np.uint32, len(self._recent))))
        self._recent.clear()
        if len(words):
            order = np.argsort(words, kind="stable")
            words, begins = np.unique(words[order], return_index=True)
            passages = np.add.reduceat(passages[order], begins, dtype=np.uint32)
        self._words, self._passages = words, passages
        return words, passages


def count_corpus(
    folder: Path,
    digest: str,
    passages: Iterable[Sequence[Sequence[str]]],
    ends: Sequence[int],
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Write the statistics of a corpus to an existing folder.

    Args:
        passages: the words of every passage in each of `FIELDS`.
        ends: of the shards, each the number of passages until there.
        progress: gets the number of counted passages.
    """
    writer, last = StatisticsWriter(), set(ends)
    for row, words in enumerate(passages, 1):
        writer.add_passage(words)
        if row in last:
            writer.end_part()
        progress(row)
    writer.write(folder, digest)


def _compute_idf(having: int, documents: int) -> float:
    """The weight of a word as tantivy computes it, in its precision."""
    one, half = np.float32(1), np.float32(0.5)
    ratio = (np.float32(documents - having) + half) / (np.float32(having) + half)
    return float(np.float32(math.log(one + ratio)))


def _hash_word(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def _name_files(field: str) -> tuple[str, str]:
    return f"{field}-words.npy", f"{field}-passages.npy"
