"""`forage trainer export`: the policy of a checkpoint as transformers loads it, from shards of any number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_parts import save_checkpoint, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from forage_runtime.errors import DataError
from forage_runtime.settings import load_settings
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.export import export_policy, find_checkpoint, read_weights
from forage_trainer.command import app
from forage_trainer.engine.policy_worker import PolicyWorker


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run's folder with two checkpoints that a real worker wrote, the first of them the best; and its weights."""
    folder = tmp_path_factory.mktemp("run")
    worker = PolicyWorker(load_settings(None, [f"model.path={write_model(folder / 'model')}", "trainer.threads=1"], {}))
    checkpoints = Checkpoints(folder / "checkpoints", 2, worker.parameters)
    for step in (3, 6):
        save_checkpoint(checkpoints, step, worker.save)
    checkpoints.mark_best({3: 0.5, 6: 0.4})
    return folder, worker.weights(torch.float32)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_transformers_loads_an_exported_policy(
    run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder, weights = run
    out = tmp_path / "out"
    ended = CliRunner().invoke(app, ["export", str(folder), str(out), "--dtype", name])
    assert ended.exit_code == 0, ended.output
    assert "step_6" in ended.output
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == name.replace("bf", "bfloat").replace("fp", "float")
    assert "torch_dtype" not in config
    stored = load_file(out / "model.safetensors")
    assert set(stored) == set(weights), "the tied head is not written twice"
    assert {w.dtype for w in stored.values()} == {dtype}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == dtype
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    for key, expected in weights.items():
        assert torch.equal(model.state_dict()[key], expected.to(dtype)), key
    text = AutoTokenizer.from_pretrained(out).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_path_names_a_checkpoint_the_newest_or_the_best(run: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = run
    assert find_checkpoint(folder, best=False).name == "step_6"
    assert find_checkpoint(folder, best=True).name == "step_3"
    assert find_checkpoint(folder / "checkpoints/step_3", best=False).name == "step_3"


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    overrides = ["trainer.lora.lora_rank=4", "trainer.lora.lora_alpha=12", "trainer.threads=1"]
    worker = PolicyWorker(load_settings(None, [f"model.path={write_model(tmp_path / 'model')}", *overrides], {}))
    before = worker.weights(torch.float32)
    with torch.no_grad():
        for name, parameter in worker._actor.engine.module.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    checkpoint = save_checkpoint(Checkpoints(tmp_path / "checkpoints", 2, 10), 3, worker.save)
    export_policy(checkpoint, tmp_path / "out", torch.float32, 2**30)
    result, expected = load_file(tmp_path / "out/model.safetensors"), worker.weights(torch.float32)
    assert set(result) == set(expected)
    assert any(not torch.equal(result[name], before[name]) for name in result)
    for name, weight in expected.items():
        torch.testing.assert_close(result[name], weight, atol=1e-6, rtol=0)
    (checkpoint / "state/lora_train_meta.json").unlink()
    with pytest.raises(DataError, match=r"lora_train_meta\.json cannot be read"):
        read_weights(checkpoint / "state", torch.float32)


def test_a_source_that_cannot_be_exported_is_named(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, _ = run
    checkpoint = folder / "checkpoints/step_3"
    with pytest.raises(DataError, match=r"neither a checkpoint .* nor a run"):
        find_checkpoint(tmp_path, best=False)
    with pytest.raises(DataError, match="names no best checkpoint"):
        find_checkpoint(tmp_path, best=True)
    with pytest.raises(DataError, match=f"{tmp_path} exists"):
        export_policy(checkpoint, tmp_path, torch.float32, 2**30)
    shard = checkpoint / "state/model/part_rank_0.safetensors"
    before = shard.read_bytes()
    shard.write_bytes(before[:-1] + b"x")
    try:
        with pytest.raises(DataError, match="step_3 is damaged"):
            export_policy(checkpoint, tmp_path / "out", torch.float32, 2**30)
    finally:
        shard.write_bytes(before)
    assert not (tmp_path / "out").exists()
