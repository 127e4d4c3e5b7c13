"""What the trainer makes of a model of any family: whether it packs rows, what its LoRA adapts. Imports torch and verl.

Each function takes a model's folder in the Hugging Face layout, with a tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from random_model import CONTROLS, build_tokenizer
from structlog.testing import capture_logs

from forage_runtime.settings import load_settings
from forage_trainer.engine.engine_config import build_engine_config, build_model_config, resolve_engine
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.engine.spmd import Processes
from forage_trainer.engine.verl_worker import VerlWorker

_FEW = ("trainer.threads=1", "trainer.actor.use_kl_loss=false")


def write_tokenizer(folder: Path) -> None:
    """Add a tokenizer; it has a token for the begin, which verl copies into the configuration where some need one."""
    tokenizer = build_tokenizer()
    tokenizer.bos_token = CONTROLS[1]
    tokenizer.save_pretrained(folder)


def find_packing_problem(folder: Path, attention: str) -> str | None:
    """Build the trainer's engine with packed rows and an attention; returns why it pads them instead, None: it packs.

    Args:
        attention: of those in `forage_trainer.engine.attention`; flex_attention, too, which settings refuse on a CPU.
    """
    settings = load_settings(None, [f"model.path={folder}", *_FEW], {})
    resolved = resolve_engine(settings.trainer.engine, False).model_copy(
        update={"attn_implementation": attention, "use_remove_padding": True}
    )
    model, engine = build_model_config(folder, resolved), build_engine_config(resolved, 8192, forward_only=True)
    processes = Processes.join(settings.trainer.collective_timeout_s, settings.run.folder / "columns")
    with capture_logs() as logs:
        worker = VerlWorker("language_model", model, engine, None, processes)
    if worker.engine.use_remove_padding:
        return None
    return str(next(line["reason"] for line in logs if line["event"] == "rows_are_padded"))


def start_trainer(folder: Path) -> None:
    """Start the trainer with the settings' defaults on a CPU: padded rows, no LoRA."""
    PolicyWorker(load_settings(None, [f"model.path={folder}", *_FEW], {}))


def describe_lora(folder: Path) -> dict[str, Any]:
    """Start the trainer with the default LoRA; returns what it logs of the adapter: `modules`, `experts`, `routers`,
    each a number by name, the number of its `parameters`, and whether engines get `merged` policies instead."""
    lora = ("trainer.lora.lora_rank=4", "trainer.lora.lora_alpha=8", "rollout.engine.max_lora_rank=8")
    with capture_logs() as logs:
        PolicyWorker(load_settings(None, [f"model.path={folder}", *_FEW, *lora], {}))
    line = next(line for line in logs if line["event"] == "adapter_trained")
    return {name: line[name] for name in ("modules", "experts", "routers", "parameters", "merged")}
