"""Which GPUs the retriever uses and why not, in which precision it encodes, and its threads."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forage_common.errors import SettingsError, UserError
from forage_common.settings import EncoderPrecision, EncoderSettings, RetrieverSettings, load_settings
from forage_retriever import devices
from forage_retriever.devices import Shown
from forage_retriever.encoders import conventions, factory, model_folder
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.encoders.torch_encoder import TorchEncoder
from forage_retriever.search import faiss_gpu

TEXTS = ["Oslo", "", "the money of Norway, " * 9, "who was the first king of all Norway?"]


class Driver:
    """Answers as libcuda does; this machine has none."""

    def __init__(self, code: int = 0, gpus: int = 0, version: int = 13000) -> None:
        self.code, self.gpus, self.version = code, gpus, version

    def __call__(self, name: str) -> Driver:
        assert name == "libcuda.so.1"
        return self

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"system not yet initialized"
        return 0


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.ask_driver(Driver(gpus=2, version=13020)) == Shown(2, 13020)
    assert devices.ask_driver(Driver()).problem == "CUDA shows this process no GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = "CUDA shows this process no GPU (CUDA_VISIBLE_DEVICES='')"
    assert devices.ask_driver(Driver(code=100)) == Shown(0, problem=hidden)
    broken = "CUDA does not start (system not yet initialized, error 802)"
    assert devices.ask_driver(Driver(code=802)) == Shown(0, problem=broken)
    if not has_driver():
        assert devices.ask_driver().problem == "this machine has no NVIDIA driver (libcuda.so.1 is missing)"


@pytest.mark.parametrize(
    ("driver", "torch", "faiss", "reason"),
    [
        (Driver(code=802), "13.0", True, "CUDA does not start (system not yet initialized, error 802)"),
        (Driver(gpus=2), "", True, "the installed PyTorch was built for CPUs (install those for GPUs with"),
        (Driver(gpus=2), "13.0", False, "the installed FAISS was built for CPUs (install those for GPUs with"),
        (Driver(gpus=2, version=12080), "13.0", True, "the driver runs CUDA 12.8 and PyTorch was built for 13.0"),
    ],
)
def test_gpus_that_cannot_be_used_are_an_error_only_if_they_are_demanded(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, torch: str, faiss: bool, reason: str
) -> None:
    ask = devices.ask_driver
    monkeypatch.setattr(devices, "ask_driver", lambda: ask(driver))
    monkeypatch.setattr(devices, "find_cuda_version", lambda: torch)
    assert devices.find_gpus(RetrieverSettings(), faiss).gpus == 0
    assert devices.find_gpus(RetrieverSettings(device="cpu"), faiss) == Shown(0, problem="retriever.device is cpu")
    for word in ("gpu", "cuda"):
        with pytest.raises(SettingsError) as caught:
            devices.find_gpus(RetrieverSettings(device=word), faiss)
        assert f"retriever.device is gpu, and {reason}" in str(caught.value)
        assert "or set retriever.device=cpu" in str(caught.value)


def test_gpus_that_work_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = devices.ask_driver
    monkeypatch.setattr(devices, "ask_driver", lambda: ask(Driver(gpus=3, version=13010)))
    monkeypatch.setattr(devices, "find_cuda_version", lambda: "13.0")
    assert devices.find_gpus(RetrieverSettings(), True).gpus == 3
    wanted = {
        EncoderPrecision.AUTO: EncoderPrecision.FP16,
        EncoderPrecision.FP16: EncoderPrecision.FP16,
        EncoderPrecision.FP32: EncoderPrecision.FP32,
        EncoderPrecision.INT8: None,
    }
    for asked, chosen in wanted.items():
        settings = RetrieverSettings(encoder=EncoderSettings(precision=asked))
        assert factory.choose_gpu_precision(settings) is chosen


def test_an_encoder_that_does_not_run_on_the_gpu_stays_on_the_cpu_unless_it_must(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver shows a GPU, and PyTorch cannot use it: this one is built for CPUs, whatever is said here."""
    if torch.version.cuda:
        pytest.skip("this PyTorch is built for CUDA")
    ask = devices.ask_driver
    monkeypatch.setattr(devices, "ask_driver", lambda: ask(Driver(gpus=1)))
    monkeypatch.setattr(devices, "find_cuda_version", lambda: "13.0")
    settings = RetrieverSettings(cache_dir=repository / ".cache/retriever", threads=1)
    assert create_encoder(settings).precision == "int8"
    half = EncoderSettings(precision=EncoderPrecision.FP16)
    for must in ({"device": "gpu"}, {"encoder": half}):
        with pytest.raises(UserError, match=r"minilm does not run on the GPU \(Torch not compiled with CUDA"):
            create_encoder(settings.model_copy(update=must))


def test_on_cpus_auto_is_int8_and_fp16_is_refused(repository: Path) -> None:
    cache = repository / ".cache/retriever"
    encoders = {
        asked: create_encoder(
            RetrieverSettings(cache_dir=cache, device="cpu", threads=1, encoder=EncoderSettings(precision=asked)),
            building=building,
        )
        for asked in (EncoderPrecision.AUTO, EncoderPrecision.INT8)
        for building in (False, True)
    }
    assert {encoder.precision for encoder in encoders.values()} == {"int8"}
    assert len({encoder.digest for encoder in encoders.values()}) == 1
    half = EncoderSettings(precision=EncoderPrecision.FP16)
    with pytest.raises(SettingsError, match=r"fp16, which needs a GPU, and retriever\.device is cpu: set it to auto"):
        create_encoder(RetrieverSettings(cache_dir=cache, device="cpu", encoder=half))


def test_a_host_with_a_gpu_and_packages_for_cpus_builds_as_one_without(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After plain `make setup` on a machine with GPUs: by the settings, not with torch on CPUs."""
    ask = devices.ask_driver
    monkeypatch.setattr(devices, "ask_driver", lambda: ask(Driver(gpus=8)))
    monkeypatch.setattr(devices, "find_cuda_version", lambda: "")
    encoder = create_encoder(RetrieverSettings(cache_dir=repository / ".cache/retriever"), building=True)
    assert (type(encoder).__name__, encoder.precision) == ("OnnxEncoder", "int8")


def test_without_a_gpu_vectors_are_searched_on_cpus() -> None:
    if has_driver():
        pytest.skip("this machine has a driver")
    assert faiss_gpu.open_gpus(RetrieverSettings()) is None
    with pytest.raises(SettingsError, match=r"retriever.device is gpu, and this machine has no NVIDIA driver"):
        faiss_gpu.open_gpus(RetrieverSettings(device="gpu"))


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


def test_words_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(overrides=["retriever.device=cuda"], environ={}).retriever.device == "gpu"
    with pytest.raises(SettingsError, match=r"retriever\.device.*'auto', 'cpu', 'gpu' or 'cuda'"):
        load_settings(overrides=["retriever.device=tpu"], environ={})
    with pytest.raises(SettingsError, match=r"retriever\.encoder\.precision.*fp16"):
        load_settings(overrides=["retriever.encoder.precision=bf16"], environ={})
    monkeypatch.setattr(devices, "count_cpus", lambda: 5)
    assert devices.count_threads(RetrieverSettings()) == 5
    assert devices.count_threads(RetrieverSettings(threads=3)) == 3
