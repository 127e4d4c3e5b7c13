"""Policies, exports and merged adapters have the names and values of `save_pretrained`, fused experts included."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import build_family, move_weights
from published_family import assert_equal, read_saved
from random_model import build_random_model
from trainer_parts import VOCABULARY, save_checkpoint, write_model
from transformers import AutoModelForCausalLM

from forage_runtime.errors import UserError
from forage_runtime.settings import load_settings
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.export import export_policy
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.weights.checkpoint_tensors import build_checkpoint

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
        "head_dim": 16,
    },
}


def write_experts(folder: Path, kind: str, **more: Any) -> Path:
    write_model(folder)  # for its tokenizer
    for file in folder.glob("*.safetensors"):
        file.unlink()
    build_random_model(kind, 7, vocab_size=VOCABULARY, **{**ADAPTED[kind], **more}).save_pretrained(folder)
    return folder


def build_worker(model: Path, *more: str) -> PolicyWorker:
    few = [f"model.path={model}", "trainer.threads=1", "trainer.actor.use_kl_loss=false"]
    return PolicyWorker(load_settings(None, [*few, *more], {}))


@pytest.mark.parametrize("kind", EXPERTS)
def test_a_policy_and_the_export_of_its_checkpoint_are_what_transformers_saves(kind: str, tmp_path: Path) -> None:
    folder = write_experts(tmp_path / "model", kind)
    worker = build_worker(folder)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    move_weights(worker._actor.engine.module)
    move_weights(own)
    own.save_pretrained(tmp_path / "expected")
    expected = read_saved(tmp_path / "expected")
    assert any(name.endswith("experts.3.w2.weight") or "experts.3.down_proj.weight" in name for name in expected)
    assert_equal(worker.weights(torch.float32), expected)
    checkpoint = save_checkpoint(Checkpoints(tmp_path / "checkpoints", 2, 10), 3, worker.save)
    export_policy(checkpoint, tmp_path / "out", torch.float32, 2**30)
    assert_equal(read_saved(tmp_path / "out"), expected)
    export_policy(checkpoint, tmp_path / "half", torch.bfloat16, 2**30)
    assert_equal(read_saved(tmp_path / "half"), {name: one.bfloat16() for name, one in expected.items()})


def test_a_model_whose_folder_has_the_names_in_memory_is_published_under_them(tmp_path: Path) -> None:
    folder = write_experts(tmp_path / "model", "mixtral")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, save_original_format=False)
    worker = build_worker(folder)
    expected = read_saved(folder)
    assert "model.layers.0.mlp.experts.gate_up_proj" in expected
    assert_equal(worker.weights(torch.float32), expected)
    checkpoint = save_checkpoint(Checkpoints(tmp_path / "checkpoints", 2, 10), 3, worker.save)
    export_policy(checkpoint, tmp_path / "out", torch.float32, 2**30)
    assert_equal(read_saved(tmp_path / "out"), expected)


def test_a_gathered_tensor_is_gone_before_the_next_one_is_gathered() -> None:
    """The memory for a policy is one copy and one fused parameter, not two copies."""
    model, alive = build_family("mixtral"), weakref.WeakSet[torch.Tensor]()
    counts = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        counts.append(len(alive))
        whole = tensor.detach().clone()
        alive.add(whole)
        return whole

    build_checkpoint(model, gather, torch.Tensor.clone)
    assert len(counts) == len(model.state_dict())
    assert set(counts) == {0}


ADAPTED = {
    **EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "topk_group": 1,
        "v_head_dim": 16,
    },
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_merged_experts_and_routers_are_the_policy_that_is_trained(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_experts(tmp_path / "model", kind)
    lora = ["trainer.lora.lora_rank=4", "trainer.lora.lora_alpha=12"]
    worker = build_worker(folder, *lora, "rollout.engine.max_lora_rank=8")
    module = worker._actor.engine.module
    logged = "".join(capfd.readouterr())
    assert "adapter_trained" in logged
    for part in ("gate_up_proj", "down_proj", "o_proj"):
        assert part in logged
    assert "merged_policies_published" in logged
    start = worker.weights(torch.float32)
    assert_equal(start, read_saved(folder))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.to_local().add_(0.3 * torch.randn(parameter.shape, generator=draw))
    ids = torch.randint(3, VOCABULARY, (2, 20), generator=draw)
    with torch.no_grad():
        trained = module(input_ids=ids, use_cache=False).logits
    before = {name: parameter.full_tensor().clone() for name, parameter in module.named_parameters()}
    merged = worker.weights(torch.float32)
    assert all(torch.equal(parameter.full_tensor(), before[name]) for name, parameter in module.named_parameters())
    changed = {name for name in merged if not torch.equal(merged[name], start[name])}
    assert any(".experts.3." in name for name in changed)
    checkpoint = save_checkpoint(Checkpoints(tmp_path / "checkpoints", 2, 10), 3, worker.save)
    export_policy(checkpoint, tmp_path / "out", torch.float32, 2**30)
    assert_equal(read_saved(tmp_path / "out"), merged)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(served(input_ids=ids, use_cache=False).logits, trained, atol=1e-4, rtol=1e-4)


def test_an_adapter_of_experts_that_engines_would_be_given_is_refused(tmp_path: Path) -> None:
    folder = write_experts(tmp_path / "model", "mixtral", num_local_experts=8)
    config = json.loads((folder / "config.json").read_text())
    del config["num_local_experts"]  # 8 is what transformers takes then
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"adapter has experts and routers.*set rollout\.engine\.max_lora_rank=0"):
        build_worker(folder, "trainer.lora.lora_rank=4", "rollout.engine.max_lora_rank=8")
    assert build_worker(folder, "trainer.lora.lora_rank=4", "rollout.engine.max_lora_rank=0").weights(torch.float32)
