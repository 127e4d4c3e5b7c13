"""Engines are started for adapters unless the trained adapter may change experts, which they serve none of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forage_runtime.files.served_lora import get_served_lora_rank
from forage_runtime.settings import load_settings

DENSE: dict[str, Any] = {"model_type": "qwen2", "num_experts": None}
SPARSE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 8}


@pytest.mark.parametrize(
    ("config", "targets", "trained", "expected"),
    [
        (DENSE, "all-linear", 4, 8),
        (SPARSE, "all-linear", 4, 0),
        ({"text_config": {"n_routed_experts": 8}}, "all-linear", 4, 0),
        ({"num_local_experts": 1}, "all-linear", 4, 8),
        (SPARSE, "[q_proj, v_proj]", 4, 8),
        (SPARSE, "[model.layers.0.self_attn.q_proj]", 4, 8),
        (SPARSE, "[q_proj, down_proj]", 4, 0),
        (DENSE, "[q_proj, down_proj]", 4, 8),
        (SPARSE, "all-linear", 0, 8),
    ],
)
def test_experts_are_served_merged(
    tmp_path: Path, config: dict[str, Any], targets: str, trained: int, expected: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    few = [f"model.path={tmp_path}", f"trainer.lora.lora_rank={trained}", f"trainer.lora.target_modules={targets}"]
    assert get_served_lora_rank(load_settings(None, [*few, "rollout.engine.max_lora_rank=8"], {})) == expected
    assert get_served_lora_rank(load_settings(None, [*few, "rollout.engine.max_lora_rank=0"], {})) == 0
