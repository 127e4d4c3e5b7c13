"""The device and the precision of real encoders, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forage_retriever import devices
from forage_retriever.devices import Shown
from forage_retriever.encoders.factory import create_encoder
from forage_runtime.errors import SettingsError
from forage_runtime.settings import EncoderPrecision, EncoderSettings, RetrieverSettings

TEXTS = ["Oslo", "", "the money of Norway, " * 9, "who was the first king of all Norway?"]


def show(gpus: int) -> Any:
    """What a driver says that shows so many GPUs."""
    return lambda: Shown(gpus, 13000)


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
    monkeypatch.setattr(devices, "ask_driver", show(8))
    monkeypatch.setattr(devices, "find_cuda_version", lambda: "")
    encoder = create_encoder(RetrieverSettings(cache_dir=repository / ".cache/retriever"), building=True)
    assert (type(encoder).__name__, encoder.precision) == ("OnnxEncoder", "int8")
