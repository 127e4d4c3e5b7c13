"""A step that computes each shared prefix once is the step that computes every row whole, for each way of training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import spmd_process
import torch
from arrived_groups import arrive
from random_model import build_random_model, write_random_model, write_value_model
from trainer_parts import VOCABULARY, build_trajectory

from forage_proto.v1.trajectory_pb2 import Trajectory, TrajectoryGroup
from forage_runtime.settings import Settings, load_settings
from forage_trainer.algorithms.estimators.grpo import grpo_outcome
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories
from forage_trainer.engine import cpu_engine
from forage_trainer.engine.policy_worker import PolicyWorker

GROUPED = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", GROUPED),
    "llama": ("llama", GROUPED | {"num_key_value_heads": 3, "tie_word_embeddings": False}),
    "a window": ("mistral", GROUPED | {"sliding_window": 16}),
    "experts": ("mixtral", {**EXPERTS, "sliding_window": None}),
}
WAYS: dict[str, list[str]] = {
    "plain": [],
    "all tokens of a response": ["trainer.algorithm.state_masking=false"],
    "an entropy bonus": ["trainer.actor.entropy_coeff=0.5"],
    "packed and fused": ["trainer.engine.use_remove_padding=true", "trainer.engine.use_fused_kernels=true"],
    "recomputed": ["trainer.engine.enable_gradient_checkpointing=true"],
    "an adapter": ["trainer.lora.lora_rank=2"],
    "groups in parts": ["trainer.actor.ppo_max_token_len_per_gpu=100"],
}
TEMPERATURES = (1.0, 0.7, 1.0)


def write_policy(folder: Path, kind: str, sizes: dict[str, Any]) -> Path:
    write_random_model(folder)  # for its tokenizer
    build_random_model(kind, 7, vocab_size=VOCABULARY, **sizes).save_pretrained(folder)
    write_value_model(folder / "critic", folder)
    return folder


def build_rows(settings: Settings) -> StepTensors:
    """Two groups: rows share the prompt, some an observation and more; one row begins another, and two are equal."""
    algorithm = settings.trainer.algorithm
    groups = [
        TrajectoryGroup(group_uid=uid, position=position, trajectories=share_tokens(build_group(uid)))
        for position, uid in enumerate("ab")
    ]
    batch = build_step_tensors(select_trajectories(list(map(arrive, groups)), algorithm), 0, 1, 0, algorithm)
    assert batch is not None
    return batch


def build_group(uid: str) -> list[Trajectory]:
    shapes = [((6, 20), 9), ((6, 9), 9), ((6, 20), 9), ((6, 13, 4), 9), ((3,), 0), ((11,), 0)]
    return [
        build_trajectory(uid, row, float(row % 2), turns=turns, observation=observed)
        for row, (turns, observed) in enumerate(shapes)
    ]


def share_tokens(rows: list[Trajectory]) -> list[Trajectory]:
    """Let row 1 begin row 0, row 2 equal it at another temperature, row 3 leave it in the second turn."""
    for row, shared in zip(rows[1:], (100, 100, 35, 14, 12), strict=True):
        size = min(shared, len(row.token_ids))
        row.token_ids[:size] = rows[0].token_ids[:size]
    for row, temperature in zip(rows, TEMPERATURES * 2, strict=True):
        row.sampling.temperature = temperature
    return rows


def take_step(folder: Path, *more: str) -> tuple[dict[str, torch.Tensor], float]:
    """Everything that a worker computes of a batch, with the gradients of actor and critic; and the shared share."""
    limits = ["trainer.actor.ppo_max_token_len_per_gpu=512", "trainer.actor.ppo_mini_batch_size=2"]
    settings = spmd_process.build_settings(folder, f"trainer.critic.path={folder / 'critic'}", *limits, *more)
    torch.manual_seed(0)
    worker, batch = PolicyWorker(settings), build_rows(settings)
    results, reference, update = spmd_process.take_step(worker, batch)
    assert reference is not None
    assert update.entropies is not None
    return results | {"reference": reference, "entropies": update.entropies}, update.shared_share


def assert_same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Within a part in 100,000 of the largest value of each tensor."""
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        bound = 1e-5 * float(value.abs().max())
        torch.testing.assert_close(
            result[name], value, rtol=0, atol=bound + 1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("model", "way"), [*((model, "plain") for model in MODELS), *(("qwen2", way) for way in list(WAYS)[1:])]
)
def test_a_step_is_that_of_rows(model: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_policy(tmp_path / "model", *MODELS[model])
    result, shared = take_step(folder, *WAYS[way])
    assert shared > 0.3
    monkeypatch.setattr(cpu_engine, "_MOST_LEFT", 0)
    expected, shared = take_step(folder, *WAYS[way])
    assert shared == 0
    assert sum(bool(value.any()) for name, value in expected.items() if name.startswith(("actor.", "critic."))) > 20
    assert_same(result, expected)


CONVOLVED = {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64, "initializer_range": 0.02}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
CHUNKS = {"num_local_experts": 2, "head_dim": 16, "intermediate_size_mlp": 64, "attention_chunk_size": 32}
STATES = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16}
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a state of two tokens": ("lfm2", CONVOLVED, "depends on the row before it"),
    "a state of all tokens": ("mamba2", {"hidden_size": 64, **STATES}, "its attention is"),
    "an attention of its own": ("codegen", {"rotary_dim": 8, "num_attention_heads": 4}, "its attention is"),
    "sinks": ("gpt_oss", SINKS, "its attention is eager"),
    "a cap": ("gemma2", {"head_dim": 16}, "has softcap, which prefix_tree lacks"),
    "chunks": ("llama4_text", CHUNKS, "the attention of packed rows is not the model's"),
    "dropout of attention": ("qwen2", {"attention_dropout": 0.1}, "has dropout, which prefix_tree lacks"),
    "dropout elsewhere": ("phi", {"resid_pdrop": 0.1}, "it draws at random in training"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_model_that_is_more_than_attention_to_tokens_of_the_row_computes_rows(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, sizes, reason = OTHERS[case]
    folder = write_random_model(tmp_path / "model")
    build_random_model(kind, 7, vocab_size=VOCABULARY, **sizes).save_pretrained(folder)
    settings = spmd_process.build_settings(
        folder, "trainer.algorithm.adv_estimator=grpo", "trainer.actor.use_kl_loss=false"
    )
    worker = PolicyWorker(settings)
    logged = "".join(capfd.readouterr())
    assert "shared_tokens_are_repeated" in logged
    assert reason in logged
    batch = build_rows(settings)
    result = worker.update(batch, batch.mask, None, None, 2)
    assert result.shared_share == 0
    assert torch.isfinite(result.log_probs).all()


def test_where_nothing_is_shared_rows_are_cut_as_ever(tmp_path: Path) -> None:
    settings = spmd_process.build_settings(write_random_model(tmp_path / "model", vocab_size=VOCABULARY))
    worker, batch = PolicyWorker(settings), spmd_process.build_rows(settings)
    result = worker.update(batch, batch.mask, worker.reference_log_probs(batch), None, 2)
    assert result.shared_share == 0


def test_an_update_of_the_demo_is_that_of_rows(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its recipe and policy, with the advantages of GRPO.

    Rows in micro-batches of other sizes differ as much: a gradient in which samples cancel out keeps fewer digits.
    """
    policy = f"model.path={repository / 'models/tiny-policy'}"
    settings = load_settings(repository / "configs/demo.yaml", [policy, f"run.dir={tmp_path}"], environ={})
    algorithm, found = settings.trainer.algorithm, []
    groups = [
        TrajectoryGroup(group_uid=uid, position=position, trajectories=share_tokens(build_group(uid)))
        for position, uid in enumerate("abcd")
    ]
    batch = build_step_tensors(select_trajectories(list(map(arrive, groups)), algorithm), 0, 1, 0, algorithm)
    assert batch is not None
    advantages = grpo_outcome(batch.token_rewards, batch.mask, batch.uids)
    for most in (cpu_engine._MOST_LEFT, 0):
        monkeypatch.setattr(cpu_engine, "_MOST_LEFT", most)
        worker = PolicyWorker(settings)
        gradients = spmd_process.record_gradients(worker._actor.engine, "actor")
        result = worker.update(batch, advantages, worker.reference_log_probs(batch), None, 16)
        assert (result.shared_share > 0) == (most > 0)
        assert len(gradients) > 40
        assert result.grad_norm > 1
        found.append(gradients | {"log_probs": result.log_probs})
    off = {name: float((value - found[0][name]).norm()) for name, value in found[1].items()}
    norms = {name: float(value.norm()) for name, value in found[1].items()}
    assert off.pop("log_probs") < 1e-5 * norms.pop("log_probs")
    assert math.hypot(*off.values()) < 1e-5 * math.hypot(*norms.values())
    assert all(difference < 2e-4 * norms[name] for name, difference in off.items())
