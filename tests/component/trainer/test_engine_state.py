"""The state of an engine in files: safe to load, of this model, and whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
import torch
from safetensors.torch import load_file
from spmd_process import build_rows
from trainer_parts import write_model

from forage_runtime.errors import DataError
from forage_runtime.settings import Settings, load_settings
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.weights.shards import read_whole


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    model = write_model(tmp_path_factory.mktemp("state") / "model")
    return load_settings(
        None,
        [f"model.path={model}", "trainer.threads=1", "trainer.actor.optim.lr=1e-3", "trainer.actor.use_kl_loss=false"],
        {},
    )


@pytest.fixture(scope="module")
def worker(settings: Settings) -> PolicyWorker:
    return PolicyWorker(settings)


def learn(worker: PolicyWorker, settings: Settings) -> dict[str, torch.Tensor]:
    batch = build_rows(settings)
    worker.update(batch, torch.linspace(-1, 1, batch.mask.numel()).view_as(batch.mask) * batch.mask, None, None, 2)
    return worker.weights(torch.float32)


def assert_equal(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_a_state_is_safetensors_and_json_and_nothing_in_it_is_pickled(
    worker: PolicyWorker, settings: Settings, tmp_path: Path
) -> None:
    learn(worker, settings)
    worker.save(tmp_path)
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    own = {name for name in files if not name.startswith("huggingface/")}
    assert own == {
        "model/part_rank_0.safetensors",
        "model_meta.json",
        "optimizer/part_rank_0.safetensors",
        "random_rank_0.json",
        "schedule.json",
    }
    assert {Path(name).suffix for name in files} == {".safetensors", ".json", ".jinja"}
    assert not any(b"ctorch" in (tmp_path / name).read_bytes() for name in files)
    moments = load_file(tmp_path / "optimizer/part_rank_0.safetensors")
    assert {name.rsplit(".", 1)[1] for name in moments} == {"exp_avg", "exp_avg_sq"}
    tied = {name for name in read_whole(tmp_path / "model") if "lm_head" in name}
    assert not tied, "a tied head is not written twice"


def test_the_next_update_and_random_numbers_follow_the_state(
    worker: PolicyWorker, settings: Settings, tmp_path: Path
) -> None:
    learn(worker, settings)
    worker.save(tmp_path)
    drawn, expected = torch.rand(3), learn(worker, settings)
    worker.load(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    assert_equal(learn(worker, settings), expected)


def test_shards_are_saved_and_loaded_behind_copies_that_a_forward_pass_left(settings: Settings, tmp_path: Path) -> None:
    engine = settings.trainer.engine.model_copy(update={"args": {"reshard_after_forward": False}})
    whole = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"engine": engine})})
    worker = PolicyWorker(whole)
    learn(worker, settings)
    worker.log_probs(build_rows(settings))
    worker.save(tmp_path)
    moments = read_whole(tmp_path / "optimizer")
    assert len(moments) == 2 * len(read_whole(tmp_path / "model"))
    expected = learn(worker, settings)
    worker.log_probs(build_rows(settings))
    worker.load(tmp_path)
    assert_equal(learn(worker, settings), expected)


def test_a_state_of_another_model_or_without_a_file_is_named(
    worker: PolicyWorker, settings: Settings, tmp_path: Path
) -> None:
    learn(worker, settings)
    worker.save(tmp_path / "state")
    before = worker.weights(torch.float32)
    for change, message in (
        (lambda folder: (folder / "model/part_rank_0.safetensors").unlink(), r"model lacks .* tensors differ"),
        (lambda folder: (folder / "model/part_rank_0.safetensors").write_bytes(b"x" * 99), r"model cannot be read"),
        (lambda folder: rename_count(folder / "schedule.json"), r"optimizer is of ghost, which the model lacks"),
    ):
        folder = tmp_path / "changed"
        shutil.copytree(tmp_path / "state", folder)
        change(folder)
        with pytest.raises(DataError, match=message):
            worker.load(folder)
        assert_equal(worker.weights(torch.float32), before)
        shutil.rmtree(folder)


def test_a_state_of_a_run_without_critic_or_adapter_is_named_with_the_settings(
    worker: PolicyWorker, settings: Settings, tmp_path: Path
) -> None:
    worker.save(tmp_path)
    more = ["trainer.actor.use_kl_loss=false", "trainer.algorithm.adv_estimator=gae", "trainer.lora.lora_rank=2"]
    other = PolicyWorker(load_settings(None, [f"model.path={settings.model.path}", "trainer.threads=1", *more], {}))
    with pytest.raises(DataError, match=r"has no critic, which trainer\.algorithm\.adv_estimator=gae needs"):
        other.load(tmp_path)
    (tmp_path / "critic").mkdir()
    with pytest.raises(DataError, match=r"another model\.path or trainer\.lora: set them as they were"):
        other.load(tmp_path)


def rename_count(file: Path) -> None:
    """Let the schedule count the updates of a parameter that no model has."""
    content = json.loads(file.read_text())
    content["counts"]["ghost.step"] = 1.0
    file.write_text(json.dumps(content))
