"""Creates the encoder that the settings ask for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from forage_common.settings import RetrieverSettings
from forage_common.telemetry.logs import get_logger
from forage_retriever.encoders import conventions, model_folder
from forage_retriever.encoders.encoder import Encoder

BUNDLED = "minilm"
_NVIDIA = Path("/proc/driver/nvidia/version")


def create_encoder(settings: RetrieverSettings, building: bool = False) -> Encoder:
    """The encoder of `settings.encoder`, exported to ONNX first if it was not exported before.

    Args:
        building: whether it will encode a corpus. Then it may run on torch: on a GPU, or where the model's architecture
            cannot be exported to ONNX.

    Raises:
        UserError: the settings, the model's folder or the endpoint are at fault.
    """
    chosen = settings.encoder
    if chosen.url:
        from forage_retriever.encoders.remote_encoder import RemoteEncoder

        return RemoteEncoder(chosen.url, chosen.convention, chosen.timeout_s)
    folder = model_folder.locate_bundled() if chosen.model == BUNDLED else Path(chosen.model)
    if chosen.convention != conventions.AUTO:
        convention = conventions.find_convention(chosen.convention)
    elif chosen.model == BUNDLED:
        convention = conventions.find_convention(BUNDLED)
    else:
        convention = conventions.infer_from_folder(folder)
    convention = replace(convention, max_tokens=model_folder.limit_max_tokens(folder, convention.max_tokens))
    if building and _shows_gpu():
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


def _shows_gpu() -> bool:
    """Whether there is a driver whose GPUs are not hidden from this process, as `forage up` hides those of others."""
    return _NVIDIA.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
