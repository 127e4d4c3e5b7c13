"""The recipe of an index: the settings that decide its content, the encoder it needs and its digest."""

from __future__ import annotations

from dataclasses import dataclass

from forage_retriever.artifacts import compute_digest
from forage_retriever.devices import count_threads
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index.manifest import Vectors
from forage_runtime.settings import RetrievalMode, RetrieverSettings

CORPUS_RECIPE = "corpus/1"
"""Changes whenever a corpus store written by older code cannot be used."""


@dataclass(frozen=True)
class Recipe:
    """The settings that decide the content of an index.

    Attributes:
        vectors: precision of the vectors stored beside a dense index; None = stored where exact scores improve the
            ranking of this index type.
    """

    mode: RetrievalMode
    filter_fields: tuple[str, ...]
    factory: str
    threads: int
    encoder: Encoder | None
    vectors: Vectors | None = None

    @classmethod
    def from_settings(
        cls, settings: RetrieverSettings, encoder: Encoder | None, vectors: Vectors | None = None
    ) -> Recipe:
        """The recipe of the settings; modes other than BM25 need an encoder."""
        return cls(
            settings.mode, settings.filter_fields, settings.faiss_factory, count_threads(settings), encoder, vectors
        )

    def compute_digest(self, source: str, shards: int = 1) -> str:
        """SHA-256 of this recipe and of the digest of a corpus file."""
        # Imported here: an index of one kind needs no library of the other.
        parts = [CORPUS_RECIPE, source, self.mode, str(shards), str(len(self.filter_fields)), *self.filter_fields]
        if self.mode is not RetrievalMode.DENSE:
            from forage_retriever.search import bm25

            parts.append(bm25.RECIPE)
        if self.encoder is not None:
            from forage_retriever.search import faiss_build

            parts += [faiss_build.RECIPE, self.encoder.digest, self.factory, str(self.vectors)]
        return compute_digest(*parts)


def load_encoder(settings: RetrieverSettings, building: bool) -> Encoder | None:
    """The encoder that the mode of these settings needs; None for BM25. `building` allows an encoder on torch.

    Raises:
        UserError: the encoder cannot be loaded, or FAISS does not know the index type.
    """
    if settings.mode is RetrievalMode.BM25:
        return None
    # Imported here: BM25 alone starts in a second and needs neither FAISS nor an encoder.
    from forage_retriever.encoders.factory import create_encoder
    from forage_retriever.search import faiss_build

    encoder = create_encoder(settings, building=building)
    faiss_build.create_index(settings.faiss_factory, encoder.dimension)  # fail at start, not after hours of encoding
    return encoder
