"""What an encoder is, and which one the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forage_common.settings import RetrieverSettings
from forage_common.telemetry.logs import get_logger
from forage_retriever.encoders import conventions, model_folder
from forage_retriever.encoders.conventions import Convention

Vectors: TypeAlias = "NDArray[np.float32]"

BUNDLED = "minilm"
_NVIDIA = Path("/proc/driver/nvidia/version")


class Encoder(Protocol):
    """Texts to vectors. Thread-safe, and a text's vector is the same whatever texts are beside it.

    Attributes:
        digest: SHA-256 of all that decides a vector: weights, tokenizer, convention, precision, recipe.
        family: SHA-256 of weights, tokenizer and convention alone: encoders of one family differ by rounding. "" where
            that cannot be known.
        model: its name.
        precision: "int8", "fp32" or "remote".
        dimension: length of a vector.
    """

    digest: str
    family: str
    model: str
    convention: Convention
    precision: str
    dimension: int

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Vectors [len(texts), dimension]."""
        ...

    def passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> Vectors:
        """Vectors [len(texts), dimension]; `progress` is told now and then how many are done."""
        ...


def load(settings: RetrieverSettings, building: bool = False) -> Encoder:
    """The encoder of `settings.encoder`, exported first if that was not done before.

    Args:
        building: whether it shall encode a corpus, for which torch may be used: on a GPU, or where a model's
            architecture cannot be exported to ONNX.

    Raises:
        UserError: the settings, the model's folder or the endpoint are at fault.
    """
    chosen = settings.encoder
    if chosen.url:
        from forage_retriever.encoders.remote_encoder import RemoteEncoder

        return RemoteEncoder(chosen.url, chosen.convention, chosen.timeout_s)
    folder = model_folder.bundled() if chosen.model == BUNDLED else Path(chosen.model)
    if chosen.convention != conventions.AUTO:
        convention = conventions.named(chosen.convention)
    elif chosen.model == BUNDLED:
        convention = conventions.named(BUNDLED)
    else:
        convention = conventions.of_folder(folder)
    convention = replace(convention, max_tokens=model_folder.max_tokens(folder, convention.max_tokens))
    if building and _NVIDIA.exists():
        from forage_retriever.encoders.torch_encoder import TorchEncoder

        return TorchEncoder(chosen.model, folder, convention)
    from forage_retriever.encoders.onnx_encoder import OnnxEncoder
    from forage_retriever.encoders.onnx_model import ExportError

    try:
        return OnnxEncoder(chosen.model, folder, convention, chosen.precision, settings.cache_dir, settings.threads)
    except ExportError as error:
        if not building:
            raise
        get_logger().warning("encoding_with_torch", reason=str(error))
        from forage_retriever.encoders.torch_encoder import TorchEncoder

        return TorchEncoder(chosen.model, folder, convention)
