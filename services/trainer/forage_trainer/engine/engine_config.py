"""The configurations of verl's engines on this machine, from the settings."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from forage_runtime.errors import UserError
from forage_runtime.settings import LoraSettings, OptimSettings, TrainingEngineSettings
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.engine.attention import PACKED, VARLEN

_GPU_ONLY = ("param_offload", "optimizer_offload", "offload_policy")
_TYPES = get_type_hints(FSDPEngineConfig)
_SIZES = "trainer.actor.ppo_max_token_len_per_gpu"
_SETTINGS = {
    "mixed_precision": "trainer.engine.param_dtype",
    "dtype": "trainer.engine.param_dtype",
    "use_fused_kernels": "trainer.engine.use_fused_kernels",
    "use_remove_padding": "trainer.engine.use_remove_padding",
    "max_token_len_per_gpu": _SIZES,
    "infer_max_token_len_per_gpu": _SIZES,
}
"""Fields of verl's engine configuration, and the setting of Forage for each."""
_LAYOUT = "Forage lays out and scores rows itself"
_BY_TOKENS = f"micro-batches are cut by tokens, see {_SIZES}"
_REFUSED = {
    "strategy": "Forage trains with FSDP2 (fsdp2)",
    "use_orig_params": "it is of FSDP1, and Forage trains with FSDP2",
    "turbo_config": "it is of another engine, and Forage trains with FSDP2",
    "forward_only": "the reference alone is, and needs no optimizer",
    "model_dtype": "the trained weights must be fp32: an update of RL is smaller than bf16 resolves",
    "use_dynamic_bsz": _BY_TOKENS,
    "micro_batch_size_per_gpu": _BY_TOKENS,
    "infer_micro_batch_size_per_gpu": _BY_TOKENS,
    "ulysses_sequence_parallel_size": f"{_LAYOUT}, each on one process",
    "pad_to_length": _LAYOUT,
    "pad_to_length_bucket": _LAYOUT,
    "entropy_from_logits_with_chunking": _LAYOUT,
    "entropy_from_logits_chunk_size": _LAYOUT,
    "entropy_checkpointing": _LAYOUT,
    "use_torch_compile": f"{_LAYOUT}, and verl would compile what is not used",
    "router_replay": "the engines do not record routes",
    "qat": "the engines would load its weights as they are",
}
"""Fields that would have no effect or a wrong one, and why."""
_WRAPPED = "transformer_layer_cls_to_wrap"
_GPU_ATTENTION = ("flash_attention_2", "flex_attention")


def resolve_engine(settings: TrainingEngineSettings, on_gpu: bool, processes: int = 1) -> TrainingEngineSettings:
    """Fill in every choice that the settings leave open.

    On a GPU rows are packed, in bf16, with flash_attn or PyTorch's own kernel; on a CPU they are padded, with sdpa in
    fp32.

    Raises:
        UserError: a setting needs a device or package that this machine lacks, or another number of processes.
    """
    if 0 < settings.fsdp_size < processes and processes % settings.fsdp_size:
        raise UserError(
            f"trainer.engine.args.fsdp_size={settings.fsdp_size} does not divide the {processes} processes into equal "
            "copies: set a divisor, or -1 for a single copy"
        )
    gpu_only = {f"args.{name}": settings.args[name] for name in _GPU_ONLY if settings.args.get(name)}
    if settings.attn_implementation in _GPU_ATTENTION:
        gpu_only["attn_implementation"] = settings.attn_implementation
    if settings.param_dtype == "bf16":
        gpu_only["param_dtype"] = settings.param_dtype
    if gpu_only and not on_gpu:
        name, value = next(iter(gpu_only.items()))
        raise UserError(f"trainer.engine.{name}={value} needs a GPU, and there is none: leave it out")
    has_flash = find_spec("flash_attn") is not None
    if settings.attn_implementation == "flash_attention_2" and not has_flash:
        raise UserError(
            "trainer.engine.attn_implementation flash_attention_2 needs the package flash_attn: install it, "
            "or set trainer.engine.attn_implementation=varlen"
        )
    packed = on_gpu if settings.use_remove_padding is None else settings.use_remove_padding
    fastest = "flash_attention_2" if on_gpu and has_flash else VARLEN
    attention = settings.attn_implementation or (fastest if packed else "sdpa")
    if on_gpu and attention not in PACKED:
        get_logger().warning("rows_are_padded", attention=attention, remedy="leave attn_implementation out")
    defaults = {
        "attn_implementation": attention,
        "use_remove_padding": attention in PACKED,
        "use_fused_kernels": on_gpu,
        "param_dtype": "bf16" if on_gpu else "fp32",
        "enable_gradient_checkpointing": on_gpu,
    }
    return settings.model_copy(update={name: v for name, v in defaults.items() if getattr(settings, name) is None})


def build_model_config(
    path: Path, engine: TrainingEngineSettings, lora: LoraSettings | None = None, tokenizer: Path | None = None
) -> HFModelConfig:
    """Build the model configuration of one worker; not shared, since verl changes it.

    Args:
        tokenizer: folder of the tokenizer, where `path` has none.
    """
    adapters = {}
    if lora is not None and lora.lora_rank:
        modules = lora.target_modules
        adapters = {
            "lora_rank": lora.lora_rank,
            "lora_alpha": lora.lora_alpha,
            "target_modules": modules if isinstance(modules, str) else list(modules),
        }
    return HFModelConfig(
        path=str(path),
        tokenizer_path=str(tokenizer or path),
        override_config={"attn_implementation": engine.attn_implementation},
        use_remove_padding=engine.use_remove_padding,
        use_fused_kernels=engine.use_fused_kernels,
        enable_gradient_checkpointing=engine.enable_gradient_checkpointing,
        **adapters,
    )


def build_engine_config(
    engine: TrainingEngineSettings, tokens: int, forward_only: bool = False, param_offload: bool | None = None
) -> FSDPEngineConfig:
    """Build an engine configuration.

    The trained weights are fp32, whatever the type of the passes: an update of RL is smaller than bf16 resolves. What
    is not trained is stored in the type of the passes, to which its weights would be cast in each of them.

    Args:
        tokens: size limit of a micro-batch of a process.
        param_offload: None: as `engine` says.
    """
    # Without it every process holds gradients of all parameters until an update's last micro-batch: 28 GiB at 7B.
    fields: dict[str, Any] = {"use_no_sync_for_gradient_accumulation": False}
    fields |= copy.deepcopy(check_engine_args(engine.args))  # verl and the CPU engine change it
    if param_offload is not None:
        fields["param_offload"] = param_offload
    return FSDPEngineConfig(
        **fields,
        strategy="fsdp2",
        forward_only=forward_only,
        model_dtype=engine.param_dtype if forward_only else "fp32",
        use_torch_compile=False,  # it would compile verl's entropy of logits, which is not used
        mixed_precision={"param_dtype": engine.param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_dynamic_bsz=True,
        max_token_len_per_gpu=tokens,
        infer_max_token_len_per_gpu=tokens,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
    )


def build_optimizer_config(optim: OptimSettings, total_steps: int) -> FSDPOptimizerConfig:
    """Build the configuration of AdamW and of its learning rate's course."""
    config = FSDPOptimizerConfig(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        lr_warmup_steps=optim.lr_warmup_steps,
        total_training_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio,
    )
    config.lr_scheduler_type = optim.lr_scheduler_type  # verl's constructor does not know linear, which `scoring` adds
    return config


def check_engine_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `trainer.engine.args`, fields of verl's FSDPEngineConfig.

    Raises:
        UserError: verl has no such field, Forage sets it or cannot honour it, or the value is of another type.
    """
    fields = {field.name: field for field in dataclasses.fields(FSDPEngineConfig)}
    for name, value in args.items():
        where = f"trainer.engine.args.{name}"
        if name not in fields or name.startswith("_"):
            near = difflib.get_close_matches(name, fields, n=3)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UserError(f"{where} is no field of verl's FSDPEngineConfig{meant}")
        if name in _SETTINGS:
            raise UserError(f"{where} is set by {_SETTINGS[name]}: set that instead")
        if name in _REFUSED:
            raise UserError(f"{where} cannot be set: {_REFUSED[name]}; leave it out")
        try:
            TypeAdapter(_TYPES[name]).validate_python(value, strict=True)
        except ValidationError as error:
            raise UserError(f"{where} = {value!r} is no value for verl: {error.errors()[0]['msg']}") from None
    if strange := args.get("wrap_policy", {}).keys() - {_WRAPPED}:
        where = f"trainer.engine.args.wrap_policy.{min(strange)}"
        raise UserError(f"{where} means nothing to FSDP2, which reads {_WRAPPED} alone: leave it out")
    if "seed" in args and not args.get("full_determinism"):
        raise UserError("trainer.engine.args.seed is of full_determinism, which is false: see run.seed, or set both")
    return dict(args)
