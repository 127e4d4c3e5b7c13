"""What reaches verl's engines: further fields by their names, and the types of trained and of frozen weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
from verl.workers.config import FSDPEngineConfig

from forage_runtime.errors import UserError
from forage_runtime.settings import TrainingEngineSettings
from forage_trainer.engine import engine_config
from forage_trainer.engine.engine_config import build_engine_config, resolve_engine

PASSED = {
    "forward_prefetch": True,
    "full_determinism": True,
    "reshard_after_forward": False,
    "seed": 7,
    "use_no_sync_for_gradient_accumulation": True,
}


ON_A_GPU = {"fsdp_size": 2, "offload_policy": True, "optimizer_offload": True, "param_offload": True}


def build(args: dict[str, Any], on_gpu: bool = False) -> FSDPEngineConfig:
    return build_engine_config(resolve_engine(TrainingEngineSettings(args=args), on_gpu), 100)


def test_a_field_reaches_verl() -> None:
    config = build(PASSED)
    assert {name: getattr(config, name) for name in PASSED} == PASSED
    config = build(ON_A_GPU, on_gpu=True)
    assert {name: getattr(config, name) for name in ON_A_GPU} == ON_A_GPU
    wrapped = {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
    config = build({"wrap_policy": wrapped})
    config.wrap_policy["more"] = 1
    assert wrapped == {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}, "verl's changes are its own"


def test_every_field_of_verl_is_passed_set_by_a_setting_or_refused_with_a_reason() -> None:
    fields = {field.name for field in dataclasses.fields(FSDPEngineConfig) if not field.name.startswith("_")}
    known = engine_config._SETTINGS.keys() | engine_config._REFUSED.keys()
    assert known <= fields
    assert fields - known == PASSED.keys() | ON_A_GPU.keys() | {"wrap_policy"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "forward_prefech",
            True,
            r"is no field of verl's FSDPEngineConfig; did you mean forward_prefetch",
        ),
        ("zzz", 1, r"args\.zzz is no field of verl's FSDPEngineConfig$"),
        ("_target_", "os.system", "is no field"),
        ("mixed_precision", {}, r"is set by trainer\.engine\.param_dtype: set that instead"),
        ("model_dtype", "bf16", "the trained weights must be fp32"),
        ("ulysses_sequence_parallel_size", 2, "each on one process; leave it out"),
        ("forward_prefetch", "yes", r"args\.forward_prefetch = 'yes' is no value for verl"),
        ("seed", True, "is no value for verl"),
        ("seed", 7, r"args\.seed is of full_determinism, which is false: see run\.seed"),
        ("wrap_policy", {"min_num_params": 9}, r"wrap_policy\.min_num_params means nothing to FSDP2"),
    ],
)
def test_a_field_that_cannot_be_passed_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build({name: value})


def test_processes_that_copies_do_not_divide_are_named() -> None:
    for size, processes in ((-1, 3), (2, 4), (4, 2), (3, 3)):
        resolve_engine(TrainingEngineSettings(args={"fsdp_size": size}), False, processes)
    with pytest.raises(UserError, match=r"trainer\.engine\.args\.fsdp_size=2 does not divide the 3 processes"):
        resolve_engine(TrainingEngineSettings(args={"fsdp_size": 2}), False, 3)


def test_trained_weights_are_fp32_and_the_reference_is_of_the_type_of_the_passes() -> None:
    resolved = resolve_engine(TrainingEngineSettings(), True)
    trained, reference = build_engine_config(resolved, 100), build_engine_config(resolved, 100, True, False)
    assert resolved.param_dtype == "bf16"
    assert trained.mixed_precision == reference.mixed_precision
    assert (trained.model_dtype, reference.model_dtype) == ("fp32", "bf16")
    assert (trained.param_offload, reference.param_offload) == (False, False)
    assert build_engine_config(resolved, 100, True, True).param_offload
