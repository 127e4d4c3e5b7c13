"""What a load in place gives is what a fresh start gives, over families of models that a CPU serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(3600)
NOISE = 1e-5
"""Largest difference of float32 log-probabilities that two starts of an engine may have."""
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
def test_a_load_in_place_gives_what_a_fresh_start_gives(
    kinds: tuple[str, ...], tmp_path: Path, repository: Path
) -> None:
    support = repository / "tests/support"
    command = [sys.executable, str(support / "family_loads.py"), str(tmp_path), *kinds]
    environment = os.environ | {"PYTHONPATH": str(support)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    found = {line.pop("kind"): line for line in lines}
    assert [*found] == [*kinds], ended.stderr[-4000:]
    wrong = {
        kind: line
        for kind, line in found.items()
        if "error" in line or max(line["there"], line["back"]) > NOISE or line["moved"] < 1000 * NOISE
    }
    assert not wrong, f"{wrong}\n{ended.stderr[-4000:]}"
