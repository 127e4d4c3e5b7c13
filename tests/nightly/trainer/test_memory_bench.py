"""The memory benchmark on a tiny model: what it says of parts that can be computed by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOKENS, VOCABULARY = 2048, 30_000
MEASURE = f"""
import json, sys
from dataclasses import asdict
from transformers import Qwen2Config
import peak
config = Qwen2Config(
    vocab_size={VOCABULARY}, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="varlen",
)
measured = [peak.measure_update(config, {TOKENS}, 2, head) for head in (peak.LOGITS_KEPT, peak.FUSED)]
print(json.dumps([asdict(memory) | {{"peak": memory.peak}} for memory in measured]))
"""


def test_parts_are_those_of_the_shapes(repository: Path) -> None:
    """In a process of its own, since it makes a process group without other members."""
    path = os.pathsep.join([str(repository / "lab/benchmarks/memory"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", MEASURE]
    output = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    kept, fused = json.loads(output.stdout.splitlines()[-1])
    half = (VOCABULARY * 64 + 2 * (64 * (64 + 32 + 32) + 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64) // 2
    for memory in (kept, fused):
        assert memory["weights"] == memory["gradients"] == memory["optimizer"] // 2 == 4 * half
        assert memory["step"] == pytest.approx(5 * memory["weights"], rel=0.01)
        assert memory["backward"] > memory["weights"] + memory["optimizer"] + memory["logits"]
        assert memory["peak"] == max(memory["backward"], memory["step"])
    logits = 4 * TOKENS * VOCABULARY
    assert 3 * logits < kept["logits"] < 5 * logits
    assert fused["logits"] < 1.5 * logits  # chunks of a quarter, in several copies
