"""Which GPUs the retriever uses and why not, in which precision it encodes, and its threads."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from forage_retriever import devices
from forage_retriever.devices import Shown
from forage_retriever.encoders import factory
from forage_retriever.search import faiss_gpu
from forage_runtime.errors import SettingsError
from forage_runtime.settings import EncoderPrecision, EncoderSettings, RetrieverSettings, load_settings

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


def test_without_a_gpu_vectors_are_searched_on_cpus() -> None:
    if has_driver():
        pytest.skip("this machine has a driver")
    assert faiss_gpu.open_gpus(RetrieverSettings()) is None
    with pytest.raises(SettingsError, match=r"retriever.device is gpu, and this machine has no NVIDIA driver"):
        faiss_gpu.open_gpus(RetrieverSettings(device="gpu"))


def test_words_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(overrides=["retriever.device=cuda"], environ={}).retriever.device == "gpu"
    with pytest.raises(SettingsError, match=r"retriever\.device.*'auto', 'cpu', 'gpu' or 'cuda'"):
        load_settings(overrides=["retriever.device=tpu"], environ={})
    with pytest.raises(SettingsError, match=r"retriever\.encoder\.precision.*fp16"):
        load_settings(overrides=["retriever.encoder.precision=bf16"], environ={})
    monkeypatch.setattr(devices, "count_cpus", lambda: 5)
    assert devices.count_threads(RetrieverSettings()) == 5
    assert devices.count_threads(RetrieverSettings(threads=3)) == 3
