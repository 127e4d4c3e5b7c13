"""Builds, publishes and trains a tiny model of each family. usage: models_trainer.py FOLDER [--only …] [--again]

By the trainer's environment, with tests/support on the path.
"""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from families import measure_families
from family_training import describe_lora, find_packing_problem, start_trainer, write_tokenizer
from model_families import VOCABULARY, list_families
from published_family import check_published, publish_family
from scored_rows import draw_rows, score_rows
from transformers import AutoModelForCausalLM

ATTENTIONS = ("varlen", "flex_attention")
LIMIT_S = 300.0
VERSIONS = ("transformers", "torch", "peft", "verl")


def measure(kind: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    for name in ("start", "published", "expected"):
        shutil.rmtree(folder / name, ignore_errors=True)
    model = publish_family(kind, folder)
    names = attempt(lambda: check_published(model, folder))
    shutil.rmtree(folder / "expected", ignore_errors=True)
    start, rows = folder / "start", draw_rows(VOCABULARY)
    scores = {"rows": rows, "published": score_rows(model.eval(), rows)}
    scores["start"] = score_rows(AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval(), rows)
    (folder / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    write_tokenizer(start)
    packs = {name: attempt(partial(find_packing_problem, start, name)) for name in ATTENTIONS}
    return {
        "names": names,
        "trains": attempt(lambda: start_trainer(start)),
        "packs": packs,
        "lora": attempt(lambda: describe_lora(start)),
        "versions": {name: version(name) for name in VERSIONS},
    }


def attempt(take: Callable[[], Any]) -> dict[str, Any]:
    """{"found": the result} or {"error": the error in a line}."""
    try:
        return {"found": take()}
    except Exception as error:  # noqa: BLE001 - the page says which
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


if __name__ == "__main__":
    measure_families("trainer", list_families(), measure, LIMIT_S)
