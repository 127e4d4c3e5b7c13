"""What a repeatable run asks of vLLM, by device."""

from __future__ import annotations

import os

import pytest

from forage_rollout.vllm_start.vllm_args import prepare_repeatable
from forage_runtime.errors import SettingsError
from forage_runtime.settings import EngineSettings

NAME = "VLLM_BATCH_INVARIANT"


def test_a_cpu_samples_one_sequence_at_a_time_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with pytest.raises(SettingsError, match=r"on a CPU run\.repeatable needs rollout\.engine\.max_num_seqs=1, not 128"):
        prepare_repeatable(True, EngineSettings())
    assert prepare_repeatable(True, EngineSettings(max_num_seqs=1)) == {"enable_prefix_caching": False}
    assert NAME not in os.environ, "vLLM has no such kernels for CPUs"


def test_a_gpu_uses_batch_invariant_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "0")
    assert prepare_repeatable(False, EngineSettings()) == {"enable_prefix_caching": False}
    assert os.environ[NAME] == "1"
