"""Arguments of vLLM are checked in a process of its own, which imports vLLM."""

from __future__ import annotations

import pytest

from forage_rollout.vllm_start.vllm_args import check_before_start
from forage_runtime.errors import SettingsError
from forage_runtime.settings import EngineSettings


def test_the_service_checks_arguments_before_it_starts() -> None:
    with pytest.raises(SettingsError, match=r"args\.kv_cache_dtyp is no argument"):
        check_before_start(EngineSettings(args={"kv_cache_dtyp": "fp8"}))
    check_before_start(EngineSettings())
