"""A tiny random model of any family of causal language models that transformers knows. Imports torch.

Sizes are set where a family's configuration has a field of that name; families whose fields depend on each other in
another way have a line of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 320
_HEAD = 32
_BY_VALUE: dict[int, tuple[str, ...]] = {
    0: ("pad_token_id",),
    1: (
        "bos_token_id",
        "first_k_dense_replace",
        "mamba_n_groups",
        "mamba_ngroups",
        "moe_num_shared_experts",
        "n_group",
        "n_groups",
        "n_shared_experts",
        "num_shared_experts",
        "topk_group",
    ),
    2: (
        "decoder_layers",
        "encoder_layers",
        "eos_token_id",
        "expand",
        "linear_num_key_heads",
        "mamba_expand",
        "moe_k",
        "moe_topk",
        "num_experts_per_tok",
        "num_experts_per_token",
        "num_global_key_value_heads",
        "num_key_value_heads",
        "swa_num_key_value_heads",
    ),
    4: (
        "decoder_attention_heads",
        "encoder_attention_heads",
        "linear_num_heads",
        "linear_num_value_heads",
        "moe_num_experts",
        "n_head",
        "n_heads",
        "n_layer",
        "n_layers",
        "n_routed_experts",
        "num_attention_heads",
        "num_experts",
        "num_heads",
        "num_hidden_layers",
        "num_layers",
        "num_local_experts",
        "swa_num_attention_heads",
        "zero_expert_num",
    ),
    8: ("index_n_heads", "laurel_rank", "mamba_d_state", "mamba_n_heads", "mamba_num_heads", "ssm_state_size"),
    _HEAD: (
        "dim_head",
        "global_head_dim",
        "head_dim",
        "hidden_size_per_layer_input",
        "index_head_dim",
        "index_topk",
        "kv_lora_rank",
        "linear_head_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "mamba_d_head",
        "mamba_head_dim",
        "o_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rel_extent",
        "rotary_dim",
        "sliding_window",
        "state_size",
        "swa_head_dim",
        "v_head_dim",
    ),
    64: ("moe_intermediate_size", "qk_head_dim", "shared_expert_intermediate_size"),
    128: ("d_model", "hidden_size", "n_embd"),
    192: (
        "decoder_ffn_dim",
        "dense_intermediate_size",
        "dff",
        "dim_ff",
        "encoder_ffn_dim",
        "ffn_dim",
        "intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_inner",
        "shared_intermediate_size",
    ),
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input"),
    256: ("max_position_embeddings", "n_positions"),
}
SIZES = {name: value for value, names in _BY_VALUE.items() for name in names}
_LATENT = {"num_key_value_heads": 4}
_HEADS = {"head_dim": _HEAD}
_GROUPS = _LATENT | {
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
}
_SPARSE = _LATENT | {"index_head_dim": 32}
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT | {"topk_method": "noaux_tc"},
    **dict.fromkeys(("axk1", "glm4_moe_lite", "longcat_flash", "minicpm3"), _LATENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), _SPARSE),
    "deepseek_v4": {"index_head_dim": 32, "qk_rope_head_dim": 8},
    **dict.fromkeys(("deepseek_v2", "dots1"), _GROUPS),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _HEADS),
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 256},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.0] * 5,
        "altup_num_inputs": 2,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": _LATENT | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "youtu": _LATENT,
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values that go before SIZES: fields that depend on each other, and layers of every kind that the family has."""
UNSET: dict[str, set[str]] = {"falcon": {"head_dim"}, "xlstm": {"qk_head_dim", "v_head_dim"}}
"""Sizes that a family computes from others."""
UNBUILT = frozenset(
    {
        "blenderbot",
        "blt",
        "cohere_compass_text",
        "dbrx",
        "emu3",
        "fuyu",
        "gemma3",
        "gemma3n",
        "gemma4_assistant",
        "gemma4_unified_assistant",
        "git",
        "got_ocr2",
        "mllama",
        "musicgen",
        "musicgen_melody",
        "phi4_multimodal",
        "plbart",
        "prophetnet",
        "qwen4_exp",
        "qwen4_exp_text",
        "reformer",
        "roc_bert",
        "whisper",
        "xlnet",
        "xmod",
        "zamba",
    }
)
"""Families whose sizes are not set here, which need another package or an image, or cannot be built alone."""


def list_families() -> list[str]:
    """List the kinds of causal language models that transformers knows and that can be built here."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - UNBUILT)


def build_config(kind: str) -> PretrainedConfig:
    """Build a tiny configuration of a family. Heads are 32 wide: vLLM on a CPU has no attention for narrower ones."""
    family = CONFIG_MAPPING[kind]
    default = family()
    if (text := getattr(default, "text_config", None)) is not None:
        return family(text_config=_choose_sizes(kind, text))
    return family(**_choose_sizes(kind, default))


def build_family(kind: str, seed: int = 0) -> PreTrainedModel:
    """Build a tiny random float32 model of a family."""
    config = build_config(kind)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > 10_000_000:
        raise ValueError(f"{kind} has {size} parameters in the sizes that are set")
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def move_weights(model: torch.nn.Module, seed: int = 5, scale: float = 0.02) -> None:
    """Change every parameter a little, as training does."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter  # of the only process: whole
            local.add_(scale * torch.randn(parameter.shape, generator=draw))


def _choose_sizes(kind: str, config: PretrainedConfig) -> dict[str, Any]:
    present = {name for name in SIZES if _has(config, name)} - UNSET.get(kind, set())
    return {name: SIZES[name] for name in present} | SPECIAL.get(kind, {})


def _has(config: PretrainedConfig, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except Exception:  # noqa: BLE001 - some configurations compute a field from others that are not set yet
        return True
