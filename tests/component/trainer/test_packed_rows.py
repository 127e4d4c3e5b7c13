"""Packed rows and chunked log-probabilities give what padded rows and full logits give, on either device's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import spmd_process
import torch
from arrived_groups import arrive
from random_model import build_random_model, write_random_model, write_value_model
from trainer_parts import VOCABULARY, build_trajectory

import forage_trainer.engine.gpu_engine  # noqa: F401  (registers the engines of GPUs)
from forage_proto.v1.trajectory_pb2 import TrajectoryGroup
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker

GROUPED = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": GROUPED,
    "llama": GROUPED | {"num_key_value_heads": 3, "tie_word_embeddings": False},
    "gemma2": GROUPED | {"head_dim": 8, "final_logit_softcapping": 5.0, "attn_logit_softcapping": None},
}
PLAIN = ["trainer.engine.use_remove_padding=false", "trainer.engine.use_fused_kernels=false"]
PACKED, FUSED = "trainer.engine.use_remove_padding=true", "trainer.engine.use_fused_kernels=true"
LIMITS = ("ppo_max_token_len_per_gpu=256", "ppo_mini_batch_size=2")
WAYS = {
    "packed": [PACKED],
    "fused": [FUSED],
    "packed and fused": [PACKED, FUSED],
    "recomputed": [PACKED, FUSED, "trainer.engine.enable_gradient_checkpointing=true"],
    "Transformers' own mask": ["trainer.engine.use_fused_kernels=true", "trainer.engine.attn_implementation=eager"],
}


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("packed") / request.param, request.param)


def write_policy(folder: Path, kind: str) -> Path:
    write_random_model(folder)  # for its tokenizer
    build_random_model(kind, 7, vocab_size=VOCABULARY, **MODELS[kind]).save_pretrained(folder)
    write_value_model(folder / "critic", folder)
    return folder


def build_rows(settings: Settings) -> StepTensors:
    """Rows of very different lengths and temperatures, one of a single response token after a single prompt token."""
    shapes = [((1,), 0), ((2, 61), 30), ((5,), 0), ((3, 4, 5), 2), ((40,), 0), ((1, 1), 1)]
    rows = [
        build_trajectory("a" if i < 3 else "b", i % 3, float(i % 2), turns=turns, observation=o)
        for i, (turns, o) in enumerate(shapes)
    ]
    del rows[0].token_ids[:-2]
    rows[0].prompt_length = 1
    for row, temperature in zip(rows, (1.0, 0.7, 1.3, 1.0, 0.5, 1.0), strict=True):
        row.sampling.temperature = temperature
    groups = [
        TrajectoryGroup(group_uid=uid, position=i, trajectories=rows[3 * i : 3 * i + 3]) for i, uid in enumerate("ab")
    ]
    algorithm = settings.trainer.algorithm
    batch = build_step_tensors(select_trajectories(list(map(arrive, groups)), algorithm), 0, 1, 0, algorithm)
    assert batch is not None
    return batch


def take_step(folder: Path, *more: str) -> dict[str, torch.Tensor]:
    """Everything that a worker computes of a batch, with the gradients of actor and critic.

    One update each: a second one would begin with weights that Adam has moved by the sign of gradients, which rounding
    decides where they are 0. The critic's head is not 0, so that its body has gradients.
    """
    limits = [f"trainer.actor.{one}" for one in LIMITS]
    settings = spmd_process.build_settings(folder, f"trainer.critic.path={folder / 'critic'}", *limits, *more)
    worker, batch = PolicyWorker(settings), build_rows(settings)
    return spmd_process.take_step(worker, batch)[0]


def assert_same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            result[name], value, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, torch.Tensor]:
    result = take_step(folder, *PLAIN)
    assert sum(name.startswith(("actor.", "critic.")) for name in result) > 40
    return result


@pytest.mark.parametrize("way", WAYS)
def test_an_update_is_the_same(folder: Path, expected: dict[str, torch.Tensor], way: str) -> None:
    assert_same(take_step(folder, *WAYS[way]), expected)


@pytest.mark.parametrize("way", [["trainer.engine.use_remove_padding=false"], WAYS["packed and fused"]])
def test_the_engine_of_gpus_computes_the_same_on_a_cpu(
    folder: Path, way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but the kernels and types, and without a reference: verl keeps that in pinned memory."""
    alone = "trainer.actor.use_kl_loss=false"
    expected = take_step(folder, *PLAIN, alone)
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert_same(take_step(folder, *way, alone), expected)


def test_a_model_that_changes_its_logits_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 2 caps its logits, which a chunked output layer would miss."""
    folder = write_policy(tmp_path / "gemma2", "gemma2")
    expected = take_step(folder, *PLAIN)
    assert "logits_are_kept" not in capsys.readouterr().err
    assert_same(take_step(folder, PACKED, FUSED), expected)
    assert "the model changes what its output layer computes" in "".join(capsys.readouterr())


def test_an_adapter_of_the_output_layer_is_refused(tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "llama", "llama")
    with pytest.raises(UserError, match=r"trainer\.lora\.target_modules has the output layer.*leave it out"):
        take_step(folder, "trainer.lora.lora_rank=2", "trainer.lora.target_modules=[q_proj, lm_head]")


def test_with_an_adapter_elsewhere_the_frozen_output_layer_is_fused(folder: Path) -> None:
    adapter = "trainer.lora.lora_rank=2"
    torch.manual_seed(0)
    assert_same(take_step(folder, PACKED, FUSED, adapter), take_step(folder, *PLAIN, adapter))


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_the_entropy_has_a_graph_only_where_the_loss_needs_it(folder: Path, coefficient: float) -> None:
    settings = spmd_process.build_settings(folder, PACKED, FUSED, f"trainer.actor.entropy_coeff={coefficient}")
    worker, seen = PolicyWorker(settings), []

    def lose(model_output: dict[str, torch.Tensor], **others: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.append(model_output["entropy"].requires_grad)
        return worker._loss(model_output, **others)

    worker._actor.set_loss(lose)
    batch = build_rows(settings)
    result = worker.update(batch, batch.mask, worker.reference_log_probs(batch), worker.log_probs(batch), 2)
    assert set(seen) == {coefficient > 0}
    assert result.entropy > 1
