"""`python lab/benchmarks/retriever/encoders.py`: cost of a query and loss of quality, by runtime and precision.

CPU time a query at 1, 16 and 64 queries at once, one thread; how far a text's vector moves because of 63 neighbours;
the cosine to fp32; hit@3 of exact search. `torch` is sentence-transformers. `per tensor` is ONNX Runtime's own dynamic
quantisation, `blocks` its MatMulNBits with 8 bits: what int8 was chosen over. Data as in `make bench-retriever`; the
first run encodes the corpus once for fp32 and once for int8, which takes minutes. Ends with one line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from questions import CACHE, Data
from questions import load as load_data
from rich.console import Console
from rich.table import Table

from forage_retriever.corpus.read import read_passages
from forage_retriever.encoders import model_folder, onnx_model
from forage_retriever.encoders.encoder import Encoder, Vectors
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.encoders.onnx_model import MODEL_FILE, OnnxModel
from forage_retriever.encoders.torch_encoder import TorchEncoder
from forage_runtime.settings import EncoderPrecision, EncoderSettings, RetrieverSettings

ARTIFACTS = CACHE / "retriever"
BATCHES = (1, 16, 64)
TIMED = 256
ROUNDS = 3
TOPK = 3
Encode = Callable[[Sequence[str]], Vectors]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.disable(logging.WARNING)  # the quantizer logs every node
    data, console = load_data(), Console()
    texts = [question.text for question in data.questions]
    fp32, int8 = (_create_encoder(precision) for precision in (EncoderPrecision.FP32, EncoderPrecision.INT8))
    torch = TorchEncoder(fp32.model, model_folder.locate_bundled(), fp32.convention)
    variants: dict[str, Encode] = {
        "torch": torch.encode_queries,
        "fp32": fp32.encode_queries,
        "int8": int8.encode_queries,
    }
    for name, folder in _quantize_alternatives(fp32).items():
        variants[name] = OnnxModel(folder, fp32.convention.max_tokens, threads=1).run
    sample = [texts[row] for row in np.random.default_rng(0).permutation(len(texts))[:TIMED]]
    cost: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in BATCHES} for name in variants}
    for _ in range(ROUNDS):
        for name, encode in variants.items():
            for batch in BATCHES:
                cost[name][batch].append(_measure_ms(encode, sample, batch))
    exact = fp32.encode_queries(texts)
    hits = {name: _measure_hits(data, one) for name, one in (("fp32", fp32), ("int8", int8))}
    table = Table("encoder", *(f"ms at {batch}" for batch in BATCHES), "neighbours move it", "cosine to fp32", "hit@3")
    metrics = {}
    for name, encode in variants.items():
        milliseconds = [statistics.median(cost[name][batch]) for batch in BATCHES]
        alone = np.concatenate([encode([text]) for text in sample[:64]])
        moved = float(abs(encode(sample[:64]) - alone).max())
        cosine = float((encode(texts) * exact).sum(1).min())
        table.add_row(
            name, *(f"{one:.2f}" for one in milliseconds), f"{moved:.1e}", f"{cosine:.4f}",
            f"{hits[name]:.4f}" if name in hits else "",
        )  # fmt: skip
        cpu_ms = dict(zip(BATCHES, milliseconds, strict=True))
        metrics[name] = {"cpu_ms": cpu_ms, "moved": moved, "cosine": cosine, "hit3": hits.get(name)}
    console.print(f"{data.name}: {len(texts)} questions, vectors of {exact.shape[1]}")
    console.print(table)
    print(json.dumps(metrics))


def _create_encoder(precision: EncoderPrecision) -> Encoder:
    return create_encoder(
        RetrieverSettings(cache_dir=ARTIFACTS, device="cpu", threads=1, encoder=EncoderSettings(precision=precision))
    )


def _quantize_alternatives(fp32: Encoder) -> dict[str, Path]:
    """Quantize the fp32 graph by other methods. Returns the folders by name."""
    digest = model_folder.digest_model(model_folder.locate_bundled())
    pooling = fp32.convention.pooling
    exported = onnx_model.export_model(
        model_folder.locate_bundled(), digest, ARTIFACTS, EncoderPrecision.FP32, 1, "encoder", pooling, "unit"
    )
    folders = {name: CACHE / f"{exported.name}-{name.replace(' ', '-')}" for name in ("per tensor", "blocks")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
        shutil.copy(exported / model_folder.TOKENIZER_FILE, folder)
    quantize_dynamic(
        exported / MODEL_FILE,
        folders["per tensor"] / MODEL_FILE,
        per_channel=True,
        weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    blocks = MatMulNBitsQuantizer(
        onnx.load(exported / MODEL_FILE), bits=8, block_size=128, is_symmetric=True, accuracy_level=4
    )
    blocks.process()
    blocks.model.save_model_to_file(str(folders["blocks"] / MODEL_FILE))
    return folders


def _measure_ms(encode: Encode, texts: Sequence[str], batch: int) -> float:
    begin = time.process_time()
    for first in range(0, len(texts), batch):
        encode(texts[first : first + batch])
    return (time.process_time() - begin) / len(texts) * 1000


def _measure_hits(data: Data, encoder: Encoder) -> float:
    """Measure the share of questions with a passage that answers them among the first three, by exact search."""
    passages = list(read_passages(data.corpus))
    file = CACHE / f"passages-{encoder.digest[:16]}-{data.name.replace(' ', '-')}.npy"
    if not file.exists():
        np.save(file, encoder.encode_passages([passage.contents for passage in passages], lambda done: None))
    vectors = np.load(file)
    queries = encoder.encode_queries([question.text for question in data.questions])
    best = np.argsort(-(queries @ vectors.T), axis=1)[:, :TOPK]
    ids = [passage.id for passage in passages]
    return statistics.fmean(
        any(ids[row] in question.gold_ids for row in rows) for question, rows in zip(data.questions, best, strict=True)
    )


if __name__ == "__main__":
    main()
