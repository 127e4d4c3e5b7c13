"""Whether rows are packed is measured at the start: a model that mixes packed rows, or has none, is padded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import spmd_process
import torch
from random_model import build_random_model
from trainer_parts import VOCABULARY, write_model

from forage_runtime.errors import UserError
from forage_trainer.engine.policy_worker import PolicyWorker

PACKED = ["trainer.engine.use_remove_padding=true"]
PADDED = ["trainer.engine.use_remove_padding=false"]
CONVOLVED = {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64, "initializer_range": 0.02}
HEADS = {"rotary_dim": 8, "num_attention_heads": 4}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
CHUNKS = {"num_local_experts": 2, "head_dim": 16, "intermediate_size_mlp": 64}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a state of two tokens, which moves outputs by 0.0006": ("lfm2", CONVOLVED, "the row before it: off by 0.0"),
    "an attention of its own": ("codegen", HEADS, "a packed row depends on the row before it: off by"),
    "no such attention": ("falcon", {}, "FalconForCausalLM has no attention varlen"),
    "sinks": ("gpt_oss", SINKS, "has s_aux, which varlen lacks"),
    "a cap": ("gemma2", {"head_dim": 16}, "has softcap, which varlen lacks"),
    "dropout": ("qwen2", {"attention_dropout": 0.1}, "has dropout, which varlen lacks"),
}


def write_kind(folder: Path, kind: str, **sizes: Any) -> Path:
    write_model(folder)  # for its tokenizer
    build_random_model(kind, 7, **{"vocab_size": VOCABULARY, **sizes}).save_pretrained(folder)
    return folder


def score(folder: Path, *more: str) -> tuple[PolicyWorker, torch.Tensor]:
    alone = ("trainer.actor.use_kl_loss=false", "trainer.algorithm.adv_estimator=grpo")
    settings = spmd_process.build_settings(folder, *alone, *more)
    worker = PolicyWorker(settings)
    return worker, worker.log_probs(spmd_process.build_rows(settings))


@pytest.mark.parametrize("case", MODELS)
def test_a_model_without_packed_rows_is_padded(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kind, sizes, reason = MODELS[case]
    folder = write_kind(tmp_path / "model", kind, **sizes)
    _, expected = score(folder, *PADDED)
    assert "rows_are_padded" not in "".join(capfd.readouterr())
    worker, result = score(folder, *PACKED)
    logged = "".join(capfd.readouterr())
    assert "rows_are_padded" in logged
    assert reason in logged
    assert not worker._actor.engine.use_remove_padding
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen2", {}),
        ("mixtral", {"num_local_experts": 4, "sliding_window": 8}),
        ("llama4_text", CHUNKS),
    ],
)
def test_a_model_that_keeps_rows_apart_is_packed(
    kind: str, sizes: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_kind(tmp_path / "model", kind, **sizes)
    _, expected = score(folder, *PADDED)
    worker, result = score(folder, *PACKED)
    assert "rows_are_padded" not in "".join(capfd.readouterr())
    assert worker._actor.engine.use_remove_padding
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_attention_in_chunks_that_a_row_can_exceed_is_padded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Packed attention has no chunks: only a row that is longer than one shows it."""
    folder = write_kind(tmp_path / "model", "llama4_text", **CHUNKS, attention_chunk_size=64)
    worker, _ = score(folder, *PACKED)
    assert "the attention of packed rows is not the model's" in "".join(capfd.readouterr())
    assert not worker._actor.engine.use_remove_padding


def test_a_model_without_sdpa_is_padded_by_the_attention_it_has(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    worker, _ = score(write_kind(tmp_path / "model", "gpt_oss", **SINKS), *PADDED)
    assert "attention_replaced" in "".join(capfd.readouterr())
    assert worker._actor.engine.module.config._attn_implementation == "eager"


def test_a_model_without_attention_is_trained(tmp_path: Path) -> None:
    """verl asks for the number of its heads, and transformers has no attention for it but its own."""
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16}
    folder = write_kind(tmp_path / "model", "mamba2", hidden_size=64, **sizes)
    config = json.loads((folder / "config.json").read_text())
    own = {name: value for name, value in config.items() if name not in ("num_attention_heads", "num_key_value_heads")}
    (folder / "config.json").write_text(json.dumps(own))
    worker, result = score(folder)
    assert torch.isfinite(result).all()
    assert not hasattr(worker._actor.engine.model_config.hf_config, "num_attention_heads"), "nor is it published"


def test_a_model_that_cannot_be_built_ends_the_start_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_kind(tmp_path / "model", "qwen2")

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no kernel for it")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    with pytest.raises(UserError, match=r"kind qwen2 cannot be trained here: .*no kernel for it.*set model\.path"):
        score(folder)
