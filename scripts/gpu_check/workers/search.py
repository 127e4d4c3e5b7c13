"""FAISS and the bundled encoder on this machine's GPU against the CPU.

`python search.py PASSAGES DIMENSION QUERIES` prints, for each index type, the share of queries with the CPU's ids and
queries a second on both, and the encoders' largest difference.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import faiss
import numpy as np
import torch

from forage_retriever.encoders import conventions, model_folder
from forage_retriever.encoders.torch_encoder import TorchEncoder
from forage_retriever.search import faiss_gpu

K, NPROBE = 10, 16
CENTRES = 1_000
TEXTS = [f"the river number {n} flows through the country number {n % 97} into the sea" for n in range(256)]


def make_vectors(rows: int, dimension: int, seed: int) -> np.ndarray[Any, Any]:
    """Unit vectors around common centres, as texts have them."""
    centres = np.random.default_rng(0).standard_normal((CENTRES, dimension), np.float32)
    chance = np.random.default_rng(seed)
    vectors = centres[chance.integers(0, CENTRES, rows)] + 0.5 * chance.standard_normal((rows, dimension), np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def compare_index(kind: str, vectors: np.ndarray[Any, Any], queries: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Search the same index on the CPU and, where there is one, on the GPU."""
    index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    if hasattr(index, "nprobe"):
        index.nprobe = NPROBE
    scores, rows = index.search(queries, K)
    exact = np.argsort(-(queries[:64] @ vectors.T), axis=1)[:, :K]
    found: dict[str, Any] = {
        "recall": float(np.mean([len(set(a) & set(b)) / K for a, b in zip(rows[:64], exact, strict=True)])),
        "cpu_queries_per_s": measure(lambda: index.search(queries, K), len(queries)),
    }
    moved = faiss_gpu.move_to_gpu(index)
    if moved is not None:
        gpu_scores, gpu_rows = moved.search(queries, K, NPROBE)
        found["same_ids"] = float((gpu_rows == rows).mean())
        found["score_difference"] = float(np.abs(gpu_scores - scores).max())
        found["gpu_queries_per_s"] = measure(lambda: moved.search(queries, K, NPROBE), len(queries))
    return found


def measure(call: Any, queries: int) -> float:
    """Queries a second, the best of three."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return queries / min(seconds)


def compare_encoders() -> dict[str, Any]:
    """The bundled encoder in ONNX on the CPU against torch on the GPU, or on the CPU."""
    from pathlib import Path

    from forage_common.settings import load_settings
    from forage_retriever.encoders.factory import create_encoder

    settings = load_settings(overrides=["retriever.encoder.precision=fp32"], environ={}).retriever
    onnx = create_encoder(settings)
    folder = Path(model_folder.locate_bundled())
    on_torch = TorchEncoder("minilm", folder, conventions.find_convention("minilm"))
    expected = onnx.encode_passages(TEXTS, lambda count: None)
    found = on_torch.encode_passages(TEXTS, lambda count: None)
    return {
        "least_cosine": float((expected * found).sum(1).min()),
        "onnx_texts_per_s": measure(lambda: onnx.encode_passages(TEXTS, lambda count: None), len(TEXTS)),
        "torch_texts_per_s": measure(lambda: on_torch.encode_passages(TEXTS, lambda count: None), len(TEXTS)),
    }


def main(passages: int, dimension: int, queries: int) -> None:
    vectors, asked = make_vectors(passages, dimension, 1), make_vectors(queries, dimension, 2)
    kinds = {"flat": "Flat", "ivf_sq8": f"IVF{max(16, passages // 200)},SQ8"}
    reply: dict[str, Any] = {name: compare_index(kind, vectors, asked) for name, kind in kinds.items()}
    reply |= {"encoder": compare_encoders(), "devices": faiss_gpu.count_devices(), "cuda": torch.cuda.is_available()}
    print(json.dumps(reply))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
