"""Whether engines serve the LoRA adapter that is trained, or whole policies into which it was merged."""

from __future__ import annotations

import json
from typing import Any

from forage_runtime.settings import Settings

_EXPERT_COUNTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")
_ATTENTION = frozenset(
    {"dense", "k_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "out_proj", "q_a_proj", "q_b_proj", "q_proj"}
    | {"qkv_proj", "query_key_value", "v_proj"}
)
"""Names of layers of attention. PEFT takes other ones in a model with experts for those of experts and routers."""


def get_served_lora_rank(settings: Settings) -> int:
    """Return the highest rank of adapters that engines are started for; 0: they serve whole policies.

    That is `rollout.engine.max_lora_rank`, but 0 where the trained adapter may change experts or routers, of which
    engines serve no adapter. Trainer and rollout both decide by this.

    Raises:
        OSError, ValueError: the model's configuration cannot be read.
    """
    rank, lora = settings.rollout.engine.max_lora_rank, settings.trainer.lora
    if not rank or not lora.lora_rank:
        return rank
    targets = {lora.target_modules} if isinstance(lora.target_modules, str) else set(lora.target_modules)
    if {target.rpartition(".")[2] for target in targets} <= _ATTENTION:
        return rank
    config = json.loads((settings.model.path / "config.json").read_text(encoding="utf-8"))
    return 0 if _has_experts(config) else rank


def _has_experts(config: dict[str, Any]) -> bool:
    parts = [config, *(part for name, part in config.items() if name.endswith("_config") and isinstance(part, dict))]
    return any(isinstance(count := part.get(name), int) and count > 1 for part in parts for name in _EXPERT_COUNTS)
