"""The interface of an encoder: texts to vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forage_retriever.encoders.conventions import Convention

Vectors: TypeAlias = "NDArray[np.float32]"


class Encoder(Protocol):
    """An encoder of texts. Thread-safe; the vector of a text does not depend on the other texts of a call, but by the
    rounding of its last bits where it is computed with torch.

    Attributes:
        digest: SHA-256 of all that decides a vector: weights, tokenizer, convention, precision, recipe.
        family: SHA-256 of weights, tokenizer and convention alone: encoders of one family differ only by rounding. ""
            where it is unknown.
        model: its name.
        precision: "int8", "fp16", "fp32" or "remote".
        device: "cpu", a GPU as torch names it, or "remote".
        dimension: length of a vector.
    """

    digest: str
    family: str
    model: str
    convention: Convention
    precision: str
    device: str
    dimension: int

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Vectors [len(texts), dimension] of queries."""
        ...

    def encode_passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> Vectors:
        """Vectors [len(texts), dimension] of passages; `progress` gets the number of encoded texts now and then."""
        ...


def encode_in_batches(
    encode: Callable[[list[str]], Vectors],
    texts: Sequence[str],
    prefix: str,
    dimension: int,
    size: int,
    progress: Callable[[int], None],
) -> Vectors:
    """Vectors [len(texts), dimension] of texts behind a prefix, `size` texts a call of `encode`."""
    vectors: Vectors = np.empty((len(texts), dimension), np.float32)
    for begin in range(0, len(texts), size):
        batch = [prefix + text for text in texts[begin : begin + size]]
        vectors[begin : begin + len(batch)] = encode(batch)
        progress(begin + len(batch))
    return vectors
