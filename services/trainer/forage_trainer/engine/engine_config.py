"""Settings → the configurations of verl's engines, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from forage_common.errors import UserError
from forage_common.settings import LoraSettings, OptimSettings, TrainingEngineSettings
from forage_common.telemetry.logs import get_logger

_NEED_A_GPU = (
    "use_remove_padding",
    "use_torch_compile",
    "param_offload",
    "optimizer_offload",
    "offload_policy",
    "entropy_from_logits_with_chunking",
)


@dataclass(frozen=True)
class Machine:
    """trainer.engine, with what was left open decided."""

    settings: TrainingEngineSettings
    attn_implementation: str
    use_remove_padding: bool
    use_torch_compile: bool
    param_dtype: str
    enable_gradient_checkpointing: bool


def decide(settings: TrainingEngineSettings, on_gpu: bool) -> Machine:
    """verl's usual on a GPU, with PyTorch's own attention where flash_attn is missing; on a CPU that and fp32.

    Raises:
        UserError: a setting needs what this machine lacks.
    """
    asked = [name for name in _NEED_A_GPU if getattr(settings, name)]
    asked += ["attn_implementation"] if settings.attn_implementation == "flash_attention_2" else []
    asked += ["param_dtype"] if settings.param_dtype == "bf16" else []
    if asked and not on_gpu:
        name = asked[0]
        raise UserError(f"trainer.engine.{name}={getattr(settings, name)} needs a GPU, and there is none: leave it out")
    has_flash = find_spec("flash_attn") is not None
    usual = "flash_attention_2" if on_gpu and (has_flash or settings.use_remove_padding) else "sdpa"
    attention = settings.attn_implementation or usual
    if attention == "flash_attention_2" and not has_flash:
        raise UserError(
            "trainer.engine.attn_implementation flash_attention_2 needs the package flash_attn: install it, "
            "or set trainer.engine.attn_implementation=sdpa"
        )
    if on_gpu and attention != "flash_attention_2":
        get_logger().warning("rows_are_padded", attention=attention, faster="install flash_attn")
    return Machine(
        settings=settings,
        attn_implementation=attention,
        use_remove_padding=_or(settings.use_remove_padding, attention == "flash_attention_2"),
        use_torch_compile=_or(settings.use_torch_compile, on_gpu),
        param_dtype=settings.param_dtype or ("bf16" if on_gpu else "fp32"),
        enable_gradient_checkpointing=_or(settings.enable_gradient_checkpointing, on_gpu),
    )


def model_config(
    path: Path, machine: Machine, lora: LoraSettings | None = None, tokenizer: Path | None = None
) -> HFModelConfig:
    """Of one worker alone: verl writes into it.

    Args:
        tokenizer: folder of it where `path` has none.
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
        override_config={"attn_implementation": machine.attn_implementation},
        use_remove_padding=machine.use_remove_padding,
        enable_gradient_checkpointing=machine.enable_gradient_checkpointing,
        **adapters,
    )


def engine_config(machine: Machine, tokens: int, forward_only: bool = False) -> FSDPEngineConfig:
    """
    Args:
        tokens: of the longest micro-batch of a process.
    """
    engine = machine.settings
    return FSDPEngineConfig(
        strategy="fsdp2",
        forward_only=forward_only,
        model_dtype="fp32",
        use_torch_compile=machine.use_torch_compile,
        mixed_precision={"param_dtype": machine.param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
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


def optimizer_config(optim: OptimSettings, total_steps: int) -> FSDPOptimizerConfig:
    """AdamW with a constant learning rate after its warm-up."""
    return FSDPOptimizerConfig(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        lr_warmup_steps=optim.lr_warmup_steps,
        total_training_steps=total_steps,
        lr_scheduler_type="constant",
    )


def _or(chosen: bool | None, usual: bool) -> bool:
    return usual if chosen is None else chosen
