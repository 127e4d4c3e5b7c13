"""An encoder on sentence-transformers, to build an index: on a GPU, or where a model has no ONNX export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from forage_common.errors import DataError
from forage_retriever import artifacts
from forage_retriever.encoders import model_folder
from forage_retriever.encoders.conventions import Convention
from forage_retriever.encoders.encoder import Vectors, encode_in_batches

RECIPE = "torch/1"
BATCH = 64
_WINDOW = 1024


class TorchEncoder:
    """An encoder on torch; see `Encoder`. Batches are consecutive, so equal calls give equal vectors."""

    precision = "fp32"

    def __init__(self, model: str, folder: Path, convention: Convention) -> None:
        """Load the encoder of a Hugging Face folder.

        Raises:
            DataError: sentence-transformers cannot load it.
        """
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        self.model = model
        self.convention = convention
        self.family = convention.compute_digest(model_folder.digest_model(folder))
        self.digest = artifacts.compute_digest(RECIPE, self.family)
        try:
            transformer = Transformer(str(folder), max_seq_length=convention.max_tokens)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"encoder {folder} cannot be loaded ({reason}): give a sentence encoder's folder") from None
        self.dimension = int(transformer.get_embedding_dimension())
        self._model = SentenceTransformer(modules=[transformer, Pooling(self.dimension, convention.pooling.value)])

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode([self.convention.query_prefix + text for text in texts])

    def encode_passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> Vectors:
        prefix = self.convention.passage_prefix
        return encode_in_batches(self._encode, texts, prefix, self.dimension, _WINDOW, progress)

    def _encode(self, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        vectors: Vectors = self._model.encode(
            list(texts),
            batch_size=BATCH,
            normalize_embeddings=self.convention.normalize,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return vectors
