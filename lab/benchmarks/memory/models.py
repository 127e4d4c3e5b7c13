"""Shapes of published models: the values of their `config.json`; docs/reference/data.md names the sources."""

from __future__ import annotations

from transformers import Qwen2Config

_COMMON = {"max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "attn_implementation": "varlen"}

MODELS = {
    "Qwen2.5-3B": Qwen2Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    "Qwen2.5-7B": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        **_COMMON,
    ),
}
