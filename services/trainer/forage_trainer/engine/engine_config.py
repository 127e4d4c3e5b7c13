"""The configurations of verl's engines on this machine, from the settings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from forage_common.errors import UserError
from forage_common.settings import LoraSettings, OptimSettings, TrainingEngineSettings
from forage_common.telemetry.logs import get_logger
from forage_trainer.engine.attention import PACKED, VARLEN

_GPU_ONLY = ("param_offload", "optimizer_offload", "offload_policy")
_GPU_ATTENTION = ("flash_attention_2", "flex_attention")


def resolve_engine(settings: TrainingEngineSettings, on_gpu: bool) -> TrainingEngineSettings:
    """Fill in every choice that the settings leave open.

    On a GPU rows are packed, in bf16, with flash_attn or PyTorch's own kernel; on a CPU they are padded, with sdpa in
    fp32.

    Raises:
        UserError: a setting needs a device or package that this machine lacks.
    """
    gpu_only = [name for name in _GPU_ONLY if getattr(settings, name)]
    gpu_only += ["attn_implementation"] if settings.attn_implementation in _GPU_ATTENTION else []
    gpu_only += ["param_dtype"] if settings.param_dtype == "bf16" else []
    if gpu_only and not on_gpu:
        name = gpu_only[0]
        raise UserError(f"trainer.engine.{name}={getattr(settings, name)} needs a GPU, and there is none: leave it out")
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


def build_engine_config(engine: TrainingEngineSettings, tokens: int, forward_only: bool = False) -> FSDPEngineConfig:
    """Build an engine configuration.

    Args:
        tokens: size limit of a micro-batch of a process.
    """
    return FSDPEngineConfig(
        strategy="fsdp2",
        forward_only=forward_only,
        model_dtype="fp32",
        use_torch_compile=False,  # it would compile verl's entropy of logits, which is not used
        mixed_precision={"param_dtype": engine.param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        param_offload=engine.param_offload,
        optimizer_offload=engine.optimizer_offload,
        offload_policy=engine.offload_policy,
        reshard_after_forward=engine.reshard_after_forward,
        fsdp_size=engine.fsdp_size,
        # Else every process holds gradients of all parameters until the last micro-batch of an update: 28 GiB at 7B.
        use_no_sync_for_gradient_accumulation=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=tokens,
        infer_max_token_len_per_gpu=tokens,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
    )


def build_optimizer_config(optim: OptimSettings, total_steps: int) -> FSDPOptimizerConfig:
    """Build the configuration of AdamW, with a constant learning rate after its warm-up."""
    return FSDPOptimizerConfig(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        lr_warmup_steps=optim.lr_warmup_steps,
        total_training_steps=total_steps,
        lr_scheduler_type="constant",
    )
