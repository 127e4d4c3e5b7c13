"""Dense search: the passages whose vectors are nearest to the query vector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forage_retriever.corpus.columns import Columns
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.hits import Filters, Hit
from forage_retriever.search.vector_index import VectorIndex
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrieverSettings


class DenseIndex:
    """A vector index with the encoder of queries and the filter columns."""

    def __init__(self, folder: Path, encoder: Encoder, columns: Columns, settings: RetrieverSettings) -> None:
        """Map the folder.

        Raises:
            UserError: it is damaged, or its vectors are not of the encoder's length.
        """
        self.vectors = VectorIndex(folder, settings)
        if self.vectors.dimension != encoder.dimension:
            raise UserError(
                f"index {folder} has vectors of {self.vectors.dimension} dimensions, the encoder's have"
                f" {encoder.dimension}: set retriever.encoder to the model that the index was built with"
            )
        self.encoder = encoder
        self._columns = columns

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        """The passages nearest to each query; a blank one has a vector too.

        Raises:
            UnknownFieldError: a filter names a field that the index does not have.
        """
        mask = self._columns.compute_mask(filters) if filters else None
        if not queries:
            return []
        vectors = self.encoder.encode_queries(queries)
        scores, rows = self.vectors.search(vectors, topk, mask)
        results = []
        for own_rows, own_scores in zip(rows.tolist(), scores.tolist(), strict=True):
            hits = [Hit(row, score) for row, score in zip(own_rows, own_scores, strict=True) if row >= 0]
            results.append(sorted(hits, key=lambda hit: (-hit.score, hit.row)))  # FAISS leaves ties in any order
        return results
