"""What kind of index is wanted, and the digest that names what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forage_common.settings import RetrievalMode, RetrieverSettings
from forage_retriever.artifacts import digest_of
from forage_retriever.index.manifest import Vectors

if TYPE_CHECKING:
    from forage_retriever.encoders.encoder import Encoder

CORPUS_RECIPE = "corpus/1"
"""Changes whenever a store made by older code would not do."""


@dataclass(frozen=True)
class Recipe:
    """What kind of index is wanted.

    Attributes:
        vectors: how vectors are kept beside a dense index; None = where its type gains by exact scores from them.
    """

    mode: RetrievalMode
    filter_fields: tuple[str, ...]
    factory: str
    threads: int
    encoder: Encoder | None
    vectors: Vectors | None = None

    @classmethod
    def of(cls, settings: RetrieverSettings, encoder: Encoder | None, vectors: Vectors | None = None) -> Recipe:
        """The recipe of settings; modes other than BM25 need an encoder."""
        return cls(settings.mode, settings.filter_fields, settings.faiss_factory, settings.threads, encoder, vectors)

    def digest(self, source: str, shards: int = 1) -> str:
        """Names what comes out: of this recipe and of the digest of a corpus file."""
        parts = [CORPUS_RECIPE, source, self.mode, str(shards), str(len(self.filter_fields)), *self.filter_fields]
        if self.mode is not RetrievalMode.DENSE:
            parts.append(_bm25_recipe())
        if self.encoder is not None:
            parts += [dense_recipe(), self.encoder.digest, self.factory, str(self.vectors)]
        return digest_of(*parts)


def dense_recipe() -> str:
    """Of the vector index."""
    # Imported here, as in `_bm25_recipe`: an index of one kind needs no library of the other.
    from forage_retriever.search import faiss_build

    return faiss_build.RECIPE


def _bm25_recipe() -> str:
    from forage_retriever.search import bm25

    return bm25.RECIPE
