"""What the trainer makes of a model of any family: whether it packs rows, what its LoRA adapts. Imports torch and verl.

Each function takes a model's folder in the Hugging Face layout, with a tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from random_model import CONTROLS, build_tokenizer
from structlog.testing import capture_logs
from transformers import PreTrainedModel

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


def draw_rows(vocabulary: int) -> list[list[int]]:
    """Draw rows of tokens, of which one is longer than the window of attention of the models of `model_families`."""
    source = random.Random(47)
    return [[source.randrange(3, vocabulary) for _ in range(length)] for length in (56, 21)]


def score_rows(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """Compute transformers' log-probabilities of the rows' tokens but the first."""
    scores = []
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist())
    return scores
