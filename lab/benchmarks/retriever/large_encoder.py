"""What encoding a question costs with a model of e5-base-v2's shape: `large_encoder.py` prints JSON.

Weights are random, since their values do not change the work. The tokenizer is MiniLM's, which has the same vocabulary
(BERT's, uncased). Questions are those of the benchmark. Reads its task, JSON, from standard input.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from questions import load

from forage_retriever.command.bench import measure_throughput
from forage_retriever.encoders import model_folder
from forage_retriever.encoders.factory import create_encoder
from forage_runtime.settings import RetrieverSettings
from forage_runtime.settings.retriever import EncoderPrecision, EncoderSettings

BATCH = 64
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def make_model(folder: Path) -> None:
    """Write a model of BERT-base's shape with random weights, unless it is there."""
    if (folder / "model.safetensors").exists():
        return
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig()).save_pretrained(folder)
    for name in _COPIED:
        if (model_folder.locate_bundled() / name).exists():
            shutil.copy(model_folder.locate_bundled() / name, folder / name)


def measure(folder: Path, seconds: float) -> dict[str, Any]:
    """CPU seconds of one thread a question, alone and in batches, by precision."""
    make_model(folder / "e5-base-shape")
    texts = [question.text for question in load().questions][:512]
    result: dict[str, Any] = {}
    for precision in (EncoderPrecision.FP32, EncoderPrecision.INT8):
        chosen = EncoderSettings(model=str(folder / "e5-base-shape"), convention="e5", precision=precision)
        encoder = create_encoder(RetrieverSettings(encoder=chosen, cache_dir=folder, threads=1))
        single, batch = (measure_throughput(encoder.encode_queries, texts, size, seconds) for size in (1, BATCH))
        result[str(precision)] = {"single_s": single["cpu_ms"] / 1000, "batch_s": batch["cpu_ms"] / 1000}
    return result


if __name__ == "__main__":
    task = json.load(sys.stdin)
    json.dump(measure(Path(task["folder"]), task["seconds"]), sys.stdout)
