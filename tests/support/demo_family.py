"""Writes a tiny random model of a family, with the tiny policy's tokenizer: `python demo_family.py KIND FOLDER`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

POLICY = Path(__file__).resolve().parents[2] / "models/tiny-policy"
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS = {
    "gpt_oss": _HEADS
    | _EXPERTS
    | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 2048},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 64},
    "mixtral": _HEADS | _EXPERTS | {"max_position_embeddings": 2048},
    "qwen3_moe": _HEADS
    | {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048},
}


def write_family(kind: str, folder: Path) -> None:
    """Write the model's folder."""
    base = AutoConfig.from_pretrained(POLICY)
    tokens = {name: getattr(base, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False, "initializer_range": 0.1}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**tokens, **sizes, **KINDS[kind])
    shutil.copytree(POLICY, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "*.md"))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    write_family(sys.argv[1], Path(sys.argv[2]))
