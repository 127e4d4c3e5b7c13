"""The configurations of verl's engines on this machine, from the settings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from forage_common.errors import UserError
from forage_common.settings import LoraSettings, OptimSettings, TrainingEngineSettings
from forage_common.telemetry.logs import get_logger

_GPU_ONLY = (
    "use_remove_padding",
    "use_torch_compile",
    "param_offload",
    "optimizer_offload",
    "offload_policy",
    "entropy_from_logits_with_chunking",
)


def resolve_engine(settings: TrainingEngineSettings, on_gpu: bool) -> TrainingEngineSettings:
    """Fill in every choice that the settings leave open.

    The choices are verl's on a GPU (with PyTorch's attention where flash_attn is missing), sdpa and fp32 on a CPU.

    Raises:
        UserError: a setting needs a device or package that this machine lacks.
    """
    gpu_only = [name for name in _GPU_ONLY if getattr(settings, name)]
    gpu_only += ["attn_implementation"] if settings.attn_implementation == "flash_attention_2" else []
    gpu_only += ["param_dtype"] if settings.param_dtype == "bf16" else []
    if gpu_only and not on_gpu:
        name = gpu_only[0]
        raise UserError(f"trainer.engine.{name}={getattr(settings, name)} needs a GPU, and there is none: leave it out")
    has_flash = find_spec("flash_attn") is not None
    default = "flash_attention_2" if on_gpu and (has_flash or settings.use_remove_padding) else "sdpa"
    attention = settings.attn_implementation or default
    if attention == "flash_attention_2" and not has_flash:
        raise UserError(
            "trainer.engine.attn_implementation flash_attention_2 needs the package flash_attn: install it, "
            "or set trainer.engine.attn_implementation=sdpa"
        )
    if on_gpu and attention != "flash_attention_2":
        get_logger().warning("rows_are_padded", attention=attention, remedy="install flash_attn for more speed")
    defaults = {
        "attn_implementation": attention,
        "use_remove_padding": attention == "flash_attention_2",
        "use_torch_compile": on_gpu,
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
        use_torch_compile=engine.use_torch_compile,
        mixed_precision={"param_dtype": engine.param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        param_offload=engine.param_offload,
        optimizer_offload=engine.optimizer_offload,
        offload_policy=engine.offload_policy,
        reshard_after_forward=engine.reshard_after_forward,
        fsdp_size=engine.fsdp_size,
        entropy_from_logits_with_chunking=engine.entropy_from_logits_with_chunking,
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
