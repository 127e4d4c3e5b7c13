"""The types of trained and of frozen weights, in verl's engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spmd_process import build_rows
from trainer_parts import write_model

from forage_runtime.errors import UserError
from forage_runtime.settings import TrainingEngineSettings, load_settings
from forage_trainer.engine.engine_config import build_engine_config, build_model_config, resolve_engine
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.engine.verl_worker import VerlWorker


def test_a_reference_in_bf16_computes_what_one_in_fp32_computes_in_bf16(tmp_path: Path) -> None:
    """Its weights are those to which FSDP casts in each pass, and rotary frequencies keep fp32."""
    path = write_model(tmp_path / "model")
    settings = load_settings(None, [f"model.path={path}", "trainer.threads=1"], {})
    worker = PolicyWorker(settings)
    engine = resolve_engine(TrainingEngineSettings(), False).model_copy(update={"param_dtype": "bf16"})
    batch, results, sizes, workers = build_rows(settings), {}, {}, {}
    for dtype in ("fp32", "bf16"):
        config = build_engine_config(engine, 8192, True, False)
        object.__setattr__(config, "model_dtype", dtype)
        one = workers[dtype] = VerlWorker(
            "language_model", build_model_config(path, engine), config, None, worker.processes
        )
        one.copy_buffers(worker._actor)
        parameters = list(one.engine.module.parameters())
        assert not any(parameter.device.type == "cuda" for parameter in parameters)
        sizes[dtype] = sum(parameter.nbytes for parameter in parameters)
        results[dtype] = one.infer(batch, "log_probs")
    assert sizes["fp32"] == 2 * sizes["bf16"]
    frequencies = [dict(one.engine.module.named_buffers())["model.rotary_emb.inv_freq"] for one in workers.values()]
    assert frequencies[0].dtype == frequencies[1].dtype == torch.float32
    assert torch.equal(*frequencies)
    torch.testing.assert_close(results["bf16"], results["fp32"], atol=1e-6, rtol=0)
    assert all(parameter.dtype == torch.float32 for parameter in worker._actor.engine.module.parameters())


def test_an_offloaded_reference_needs_a_gpu(tmp_path: Path) -> None:
    given = [f"model.path={write_model(tmp_path / 'model')}", "trainer.ref.param_offload=true"]
    with pytest.raises(UserError, match=r"trainer\.ref\.param_offload needs a GPU"):
        PolicyWorker(load_settings(None, given, {}))
