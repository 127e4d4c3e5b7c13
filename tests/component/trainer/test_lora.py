"""A policy with LoRA: only the adapter learns, and it is published merged or alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from arrived_groups import arrive
from trainer_parts import build_trajectory, write_model

from forage_proto.v1.trajectory_pb2 import TrajectoryGroup
from forage_runtime.settings import AlgorithmSettings, load_settings
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_weights.trainer.model_files import write_adapter_folder

ALGORITHM = AlgorithmSettings()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lora") / "model")


@pytest.fixture(scope="module")
def batch() -> StepTensors:
    groups = [
        TrajectoryGroup(group_uid=uid, trajectories=[build_trajectory(uid, i, float(i % 2)) for i in range(3)])
        for uid in "ab"
    ]
    result = build_step_tensors(select_trajectories(list(map(arrive, groups)), ALGORITHM), 0, 1, 0, ALGORITHM)
    assert result is not None
    return result


def build(model: Path, *more: str) -> PolicyWorker:
    few = ["trainer.threads=1", "trainer.actor.optim.lr=1e-2", "trainer.lora.lora_rank=4", "trainer.lora.lora_alpha=8"]
    return PolicyWorker(load_settings(None, [f"model.path={model}", *few, *more], {}))


def learn(worker: PolicyWorker, batch: StepTensors) -> None:
    reference = worker.reference_log_probs(batch)
    assert reference is not None
    worker.update(batch, torch.ones_like(batch.mask), reference, None, 2)


def test_the_adapter_learns_and_the_weights_are_merged(model: Path, batch: StepTensors, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    worker = build(model)
    start, initial = worker.weights(torch.float32), worker.log_probs(batch)
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = {name: tensor for name, tensor in own.state_dict().items() if name != "lm_head.weight"}
    assert start.keys() == expected.keys()
    assert all(torch.equal(start[name], expected[name]) for name in start)
    learn(worker, batch)
    learn(worker, batch)
    # The reference is the policy without its adapter, whatever the adapter has become.
    torch.testing.assert_close(worker.reference_log_probs(batch), initial, atol=1e-5, rtol=0)
    assert (worker.log_probs(batch) - initial).abs().max() > 1e-2
    adapter, merged = worker.adapter(torch.float32), worker.weights(torch.float32)
    changed = {name for name in merged if not torch.equal(merged[name], start[name])}
    assert changed == {name for name in merged if "_proj.weight" in name}

    write_adapter_folder(tmp_path, adapter)
    theirs = PeftModel.from_pretrained(own, tmp_path).merge_and_unload().state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)


def test_a_resumed_adapter_takes_the_same_next_step(model: Path, batch: StepTensors, tmp_path: Path) -> None:
    worker = build(model, "trainer.lora.target_modules=[q_proj, v_proj]")
    learn(worker, batch)
    worker.save(tmp_path / "state")
    learn(worker, batch)
    expected = worker.adapter(torch.float32)
    assert {name.rsplit(".", 3)[1] for name in expected.tensors} == {"q_proj", "v_proj"}
    worker.load(tmp_path / "state")
    learn(worker, batch)
    result = worker.adapter(torch.float32)
    assert all(torch.equal(result.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_a_policy_without_lora_has_no_adapter(model: Path) -> None:
    few = [f"model.path={model}", "trainer.threads=1", "trainer.actor.use_kl_loss=false"]
    with pytest.raises(ValueError, match="lora_rank is 0"):
        PolicyWorker(load_settings(None, few, {})).adapter(torch.float32)
