"""An encoder on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from forage_retriever import artifacts
from forage_retriever.encoders import model_folder, onnx_model
from forage_retriever.encoders.conventions import Convention
from forage_retriever.encoders.encoder import Vectors, encode_in_batches
from forage_retriever.encoders.onnx_model import OnnxModel
from forage_runtime.settings import EncoderPrecision

_WINDOW = 1024


class OnnxEncoder:
    """An encoder that was exported to an ONNX graph; see `Encoder`."""

    device = "cpu"

    def __init__(
        self,
        model: str,
        folder: Path,
        convention: Convention,
        precision: EncoderPrecision,
        cache_dir: Path,
        threads: int,
    ) -> None:
        """Load the encoder of a Hugging Face folder, exporting it first if it was not exported before.

        Raises:
            ExportError: it cannot be exported.
            UserError: the folder is not an encoder, or the cache cannot be written.
        """
        self.model = model
        self.convention = convention
        self.precision = precision.value
        digest = model_folder.digest_model(folder)
        self.family = convention.compute_digest(digest)
        recipes = (onnx_model.EXPORT_RECIPE, onnx_model.INT8_RECIPE, onnx_model.RUN_RECIPE)
        self.digest = artifacts.compute_digest(*recipes, self.precision, self.family)
        unit = "unit" if convention.normalize else "raw"
        graph = onnx_model.export_model(
            folder, digest, cache_dir, precision, threads, "encoder", convention.pooling, unit
        )
        self._model = OnnxModel(graph, convention.max_tokens, threads)
        (self.dimension,) = self._model.output_shape

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return self._model.run([self.convention.query_prefix + text for text in texts])

    def encode_passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> Vectors:
        prefix = self.convention.passage_prefix
        return encode_in_batches(self._model.run, texts, prefix, self.dimension, _WINDOW, progress)
