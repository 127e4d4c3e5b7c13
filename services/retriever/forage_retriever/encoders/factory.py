"""Creates the encoder that the settings ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forage_retriever.devices import count_threads, find_gpus
from forage_retriever.encoders import conventions, model_folder
from forage_retriever.encoders.conventions import Convention
from forage_retriever.encoders.encoder import Encoder
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import EncoderPrecision, EncoderSettings, RetrieverSettings
from forage_runtime.telemetry.logs import get_logger

BUNDLED = "minilm"


def create_encoder(settings: RetrieverSettings, building: bool = False) -> Encoder:
    """The encoder of `settings.encoder`: on a GPU with torch, on CPUs exported to ONNX if it was not exported before.

    Args:
        building: whether it will encode a corpus. Then it may run with torch on CPUs, where the model's architecture
            cannot be exported to ONNX.

    Raises:
        UserError: the settings, the model's folder or the endpoint are at fault.
    """
    chosen = settings.encoder
    if chosen.url:
        from forage_retriever.encoders.remote_encoder import RemoteEncoder

        return RemoteEncoder(chosen.url, chosen.convention)
    folder, convention = _find_folder(chosen)
    if (encoder := _open_on_gpu(settings, folder, convention)) is not None:
        return encoder
    threads = count_threads(settings)
    from forage_retriever.encoders.onnx_encoder import OnnxEncoder
    from forage_retriever.encoders.onnx_model import ExportError

    try:
        precision = choose_cpu_precision(chosen.precision)
        return OnnxEncoder(chosen.model, folder, convention, precision, settings.cache_dir, threads)
    except ExportError as error:
        if not building:
            raise
        get_logger().warning("encoding_with_torch", reason=str(error))
        import torch

        from forage_retriever.encoders.torch_encoder import TorchEncoder

        torch.set_num_threads(threads)  # it would take the machine's CPUs, whatever the container's limit
        return TorchEncoder(chosen.model, folder, convention)


def find_dimension(chosen: EncoderSettings) -> int | None:
    """The size of an encoder's vectors, by its folder alone; None: an endpoint, or a folder that does not say it.

    Raises:
        UserError: the convention or the folder is at fault.
    """
    if chosen.url:
        if chosen.convention != conventions.AUTO:
            conventions.find_convention(chosen.convention)
        return None
    folder, _ = _find_folder(chosen)
    model_folder.list_files(folder)
    size = model_folder.read_config(folder).get("hidden_size")
    return size if isinstance(size, int) else None


def _find_folder(chosen: EncoderSettings) -> tuple[Path, Convention]:
    """The folder of an encoder, and how texts enter it; raises as `create_encoder`."""
    folder = model_folder.locate_bundled() if chosen.model == BUNDLED else Path(chosen.model)
    if chosen.convention != conventions.AUTO:
        convention = conventions.find_convention(chosen.convention)
    elif chosen.model == BUNDLED:
        convention = conventions.find_convention(BUNDLED)
    else:
        convention = conventions.infer_from_folder(folder)
    return folder, replace(convention, max_tokens=model_folder.limit_max_tokens(folder, convention.max_tokens))


def _open_on_gpu(settings: RetrieverSettings, folder: Path, convention: Convention) -> Encoder | None:
    """The encoder on the first GPU, after one text; None: CPUs encode.

    Raises:
        UserError: it must run there, and does not.
    """
    precision = choose_gpu_precision(settings)
    if precision is None:
        return None
    from forage_retriever.encoders.torch_encoder import TorchEncoder

    try:
        encoder = TorchEncoder(settings.encoder.model, folder, convention, precision, "cuda:0")
        encoder.encode_queries(["does it run"])
    except (RuntimeError, AssertionError) as error:  # memory is short, or PyTorch has no code for this GPU
        reason = str(error).strip().splitlines()[0]
        if settings.device == "gpu" or settings.encoder.precision is EncoderPrecision.FP16:
            raise UserError(
                f"the encoder {settings.encoder.model} does not run on the GPU ({reason}): free its memory, or set"
                " retriever.device=cpu and retriever.encoder.precision=auto"
            ) from None
        get_logger().warning("encoder_stays_on_cpu", reason=reason)
        return None
    return encoder


def choose_gpu_precision(settings: RetrieverSettings) -> EncoderPrecision | None:
    """The precision in which a GPU encodes; None: CPUs encode.

    Raises:
        SettingsError: the device or the precision needs a GPU, and none can be used.
    """
    asked = settings.encoder.precision
    if asked is EncoderPrecision.INT8:
        return None  # of ONNX Runtime on CPUs alone; the vectors may still be searched on GPUs
    found = find_gpus(settings)
    if found.gpus:
        return EncoderPrecision.FP32 if asked is EncoderPrecision.FP32 else EncoderPrecision.FP16
    if asked is EncoderPrecision.FP16:
        raise SettingsError(
            f"retriever.encoder.precision is fp16, which needs a GPU, and {found.problem}: set it to auto, int8 or fp32"
        )
    return None


def choose_cpu_precision(asked: EncoderPrecision) -> EncoderPrecision:
    """The precision of a model on CPUs, which compute no faster in fp16 than in fp32."""
    return EncoderPrecision.INT8 if asked in (EncoderPrecision.AUTO, EncoderPrecision.INT8) else EncoderPrecision.FP32
