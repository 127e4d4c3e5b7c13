"""A synthetic corpus of any size and an index over it, built once, for measurements that depend on size.

Texts are words drawn by Zipf's law. Encoding a million would take hours, so vectors are drawn instead, each by its
text, around common centres; the index names the encoder that will search it. Its results are meaningless, but loading,
checking and scanning cost what they cost with real vectors.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forage_retriever.encoders.encoder import Encoder
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.index.cache import build_cached
from forage_retriever.index.progress import Report
from forage_runtime.settings import RetrievalMode, RetrieverSettings

WORDS = 30
"""Words of a passage."""

_VOCABULARY = 50_000
_SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvwz" for vowel in "aeiou"]
_BLOCK = 20_000
_CENTRES, _NOISE = 1000, 0.35


class SyntheticEncoder:
    """An encoder with synthetic vectors of passages; see `Encoder`. All else is the real encoder's."""

    def __init__(self, real: Encoder) -> None:
        self.digest, self.family, self.model = real.digest, real.family, real.model
        self.convention, self.precision, self.dimension = real.convention, real.precision, real.dimension
        self.device = real.device
        self.encode_queries = real.encode_queries
        self._centres = _normalize(np.random.default_rng(0).standard_normal((_CENTRES, real.dimension), np.float32))

    def encode_passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> NDArray[np.float32]:
        """Vectors [len(texts), dimension] of unit length."""
        vectors: NDArray[np.float32] = np.empty((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            chance = np.random.default_rng(zlib.crc32(text.encode()))
            centre = self._centres[chance.integers(_CENTRES)]
            vectors[row] = centre + _NOISE * _normalize(chance.standard_normal((1, self.dimension), np.float32))[0]
        progress(len(texts))
        return _normalize(vectors)


def write_corpus(folder: Path, passages: int, report: Report) -> Path:
    """Write the synthetic corpus of this size if it is missing. Returns its file."""
    file = folder / f"made-{passages}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        chance = np.random.default_rng(0)
        syllables = chance.integers(len(_SYLLABLES), size=(_VOCABULARY, 4))
        sizes = chance.integers(2, 5, _VOCABULARY)
        words = ["".join(_SYLLABLES[one] for one in row[:size]) for row, size in zip(syllables, sizes, strict=True)]
        share = np.cumsum(1 / np.arange(1, _VOCABULARY + 1))
        with temporary.open("w", encoding="utf-8") as out:
            for begin in range(0, passages, _BLOCK):
                report("writing passages", begin, passages)
                chances = chance.random((min(_BLOCK, passages - begin), WORDS))
                drawn: NDArray[np.int64] = np.searchsorted(share, chances * share[-1])
                for row, places in enumerate(drawn, begin):
                    text = [words[place] for place in places]
                    contents = f'"{text[0].title()} {row}"\n{" ".join(text)}.'
                    out.write(json.dumps({"id": str(row), "contents": contents}) + "\n")
        report("writing passages", passages, passages)
        temporary.rename(file)
    return file


def build_index(file: Path, mode: RetrievalMode, cache: Path, encoder_cache: Path, report: Report) -> Path:
    """Build the index of a synthetic corpus in `cache` if it is missing. Returns its folder."""
    real = create_encoder(RetrieverSettings(cache_dir=encoder_cache))
    return build_cached(file, RetrieverSettings(cache_dir=cache, mode=mode), SyntheticEncoder(real), report)


def _normalize(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths: NDArray[np.float32] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths
