"""Encoders on PyTorch, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forage_retriever import devices
from forage_retriever.devices import Shown
from forage_retriever.encoders import conventions, model_folder
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.encoders.torch_encoder import TorchEncoder
from forage_runtime.errors import UserError
from forage_runtime.settings import EncoderPrecision, EncoderSettings, RetrieverSettings

TEXTS = ["Oslo", "", "the money of Norway, " * 9, "who was the first king of all Norway?"]


def show(gpus: int) -> Any:
    """What a driver says that shows so many GPUs."""
    return lambda: Shown(gpus, 13000)


def test_an_encoder_that_does_not_run_on_the_gpu_stays_on_the_cpu_unless_it_must(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver shows a GPU, and PyTorch cannot use it: this one is built for CPUs, whatever is said here."""
    if torch.version.cuda:
        pytest.skip("this PyTorch is built for CUDA")
    monkeypatch.setattr(devices, "ask_driver", show(1))
    monkeypatch.setattr(devices, "find_cuda_version", lambda: "13.0")
    settings = RetrieverSettings(cache_dir=repository / ".cache/retriever", threads=1)
    assert create_encoder(settings).precision == "int8"
    half = EncoderSettings(precision=EncoderPrecision.FP16)
    for must in ({"device": "gpu"}, {"encoder": half}):
        with pytest.raises(UserError, match=r"minilm does not run on the GPU \(Torch not compiled with CUDA"):
            create_encoder(settings.model_copy(update=must))


def test_vectors_of_half_precision_are_those_of_the_same_model() -> None:
    """On the CPU, which computes halves as well, slowly."""
    folder, convention = model_folder.locate_bundled(), conventions.find_convention("minilm")
    exact = TorchEncoder("minilm", folder, convention)
    half = TorchEncoder("minilm", folder, convention, EncoderPrecision.FP16)
    assert (half.precision, exact.precision) == ("fp16", "fp32")
    assert half.family == exact.family
    assert half.digest != exact.digest
    vectors, wanted = half.encode_queries(TEXTS), exact.encode_queries(TEXTS)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-6)
    assert (vectors * wanted).sum(1).min() > 0.999
    assert np.abs(vectors - wanted).max() > 1e-6, "half precision was not used"
