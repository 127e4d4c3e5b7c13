"""What a load in place gives is what a fresh start gives, over families of models that a CPU serves."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_loads import measure_families

pytestmark = pytest.mark.timeout(3600)
DERIVED = (
    "cohere2_moe",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "falcon_h1",
    "flex_olmo",
    "gemma3n_text",
    "gpt_oss",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "lfm2_moe",
    "mamba2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
    "zaya",
)
"""vLLM packs their experts, copies their sinks, or keeps views of their weights. DENSE: some of the others."""
DENSE = (
    "bloom",
    "cohere2",
    "falcon",
    "gemma2",
    "gemma4_text",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "minicpm3",
    "mistral",
    "nanochat",
    "nemotron",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
    "starcoder2",
)


@pytest.mark.parametrize("kinds", [DERIVED, DENSE], ids=["derived", "dense"])
def test_a_load_in_place_gives_what_a_fresh_start_gives(kinds: tuple[str, ...], tmp_path: Path) -> None:
    measure_families([*kinds], tmp_path)
