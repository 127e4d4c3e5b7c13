"""An encoder on sentence-transformers: on a GPU, or to build an index where a model has no ONNX export."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from forage_retriever import artifacts
from forage_retriever.encoders import model_folder
from forage_retriever.encoders.conventions import Convention
from forage_retriever.encoders.encoder import Vectors, encode_in_batches
from forage_runtime.errors import DataError
from forage_runtime.settings import EncoderPrecision

RECIPE = "torch/1"
BATCH = 64
GPU_BATCH = 256
"""Texts in one pass of the model."""

_WINDOW = 1024


class TorchEncoder:
    """An encoder on torch; see `Encoder`. Batches are consecutive, so equal calls give equal vectors."""

    def __init__(
        self,
        model: str,
        folder: Path,
        convention: Convention,
        precision: EncoderPrecision = EncoderPrecision.FP32,
        device: str = "cpu",
    ) -> None:
        """Load the encoder of a Hugging Face folder.

        Args:
            precision: of the model's weights and states, fp16 or fp32; vectors are always float32.
            device: as torch names it.

        Raises:
            DataError: sentence-transformers cannot load it.
        """
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        self.model = model
        self.convention = convention
        self.precision = precision.value
        self.device = device
        self.family = convention.compute_digest(model_folder.digest_model(folder))
        halves = precision is EncoderPrecision.FP16
        self.digest = artifacts.compute_digest(RECIPE, *([self.precision] if halves else []), self.family)
        try:
            transformer = Transformer(str(folder), max_seq_length=convention.max_tokens)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"encoder {folder} cannot be loaded ({reason}): give a sentence encoder's folder") from None
        self.dimension = int(transformer.get_embedding_dimension())
        pooling = Pooling(self.dimension, convention.pooling.value)
        self._model = SentenceTransformer(modules=[transformer, pooling], device=device)
        if halves:
            self._model.half()
        self._batch = BATCH if device == "cpu" else GPU_BATCH
        self._own = threading.Lock()  # the tokenizer serves one caller at a time

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode([self.convention.query_prefix + text for text in texts])

    def encode_passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> Vectors:
        prefix = self.convention.passage_prefix
        return encode_in_batches(self._encode, texts, prefix, self.dimension, _WINDOW, progress)

    def _encode(self, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        with self._own:
            pooled = self._model.encode(
                list(texts), batch_size=self._batch, convert_to_numpy=True, show_progress_bar=False
            )
        vectors: Vectors = np.asarray(pooled, np.float32)
        if self.convention.normalize:
            # In float32: of length 1 but for its last bits, which half precision would not give.
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors
