"""FAISS and the bundled encoder on this machine's GPUs against the CPU.

`python search.py PASSAGES DIMENSION QUERIES` prints, for each index type, the share of neighbours with the CPU's ids,
queries a second and memory on one GPU and divided over all, and how the encoders differ.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from forage_retriever.encoders import conventions, model_folder
from forage_retriever.encoders.torch_encoder import TorchEncoder
from forage_retriever.search import faiss_build, faiss_gpu
from forage_retriever.search.vector_index import VectorIndex
from forage_runtime.settings import EncoderPrecision, RetrieverSettings

K, NPROBE = 10, 16
CENTRES = 1_000
TEXTS = [f"the river number {n} flows through the country number {n % 97} into the sea" for n in range(256)]


def make_vectors(rows: int, dimension: int, seed: int) -> np.ndarray[Any, Any]:
    """Unit vectors around common centres, as texts have them."""
    centres = np.random.default_rng(0).standard_normal((CENTRES, dimension), np.float32)
    chance = np.random.default_rng(seed)
    vectors = centres[chance.integers(0, CENTRES, rows)] + 0.5 * chance.standard_normal((rows, dimension), np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def compare_index(index: Any, vectors: np.ndarray[Any, Any], queries: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Search the same index on the CPU, on one GPU and on all of them, as the retriever does."""
    exact = np.argsort(-(queries[:64] @ vectors.T), axis=1)[:, :K]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        faiss_build.write_index(index, folder / faiss_build.INDEX_FILE)
        settings = RetrieverSettings(device="cpu", nprobe=NPROBE)
        whole = VectorIndex(folder, settings)
        scores, rows = whole.search(queries, K)
        found: dict[str, Any] = {
            "recall": float(np.mean([len(set(a) & set(b)) / K for a, b in zip(rows[:64], exact, strict=True)])),
            "cpu_queries_per_s": measure(lambda: whole.search(queries, K), len(queries)),
        }
        gpus = faiss_gpu.count_devices()
        for count in sorted({1, gpus}) if gpus else ():
            places = faiss_gpu.Gpus(count)
            before = [places.measure_free(device) for device in range(count)]
            divided = VectorIndex(folder, settings, places)
            if not divided.gpus:
                return found  # the log says why
            gpu_scores, gpu_rows = divided.search(queries, K)
            used = max(free - places.measure_free(device) for device, free in enumerate(before))
            estimated = faiss_gpu.estimate_bytes(faiss_build.unwrap_index(index), count)
            found[f"on_{count}"] = {
                "same_ids": float((gpu_rows == rows).mean()),
                "score_difference": float(np.abs(gpu_scores - scores).max()),
                "queries_per_s": measure(lambda held=divided: held.search(queries, K), len(queries)),  # type: ignore[misc]
                "used_over_estimate": used / estimated,
            }
            del divided
            gc.collect()
    return found


def build(kind: str, vectors: np.ndarray[Any, Any]) -> Any:
    index = faiss_build.create_index(kind, vectors.shape[1])
    index.train(vectors)
    index.add(vectors)
    return index


def build_cagra(vectors: np.ndarray[Any, Any]) -> Any:
    """A graph that a GPU builds, as a file for CPUs has it."""
    resources = faiss.StandardGpuResources()
    on_gpu = faiss.GpuIndexCagra(resources, vectors.shape[1], faiss.METRIC_INNER_PRODUCT)
    on_gpu.train(vectors)
    index = faiss.IndexHNSWCagra()
    on_gpu.copyTo(index)
    return index


def measure(call: Any, queries: int) -> float:
    """Queries a second, the best of three."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return queries / min(seconds)


def compare_encoders() -> dict[str, Any]:
    """The bundled encoder in ONNX on the CPU against torch on the GPU, or on the CPU, in fp32 and fp16."""
    from forage_retriever.encoders.factory import create_encoder
    from forage_runtime.settings import load_settings

    settings = load_settings(overrides=["retriever.encoder.precision=fp32", "retriever.device=cpu"], environ={})
    onnx = create_encoder(settings.retriever)
    expected = onnx.encode_passages(TEXTS, lambda count: None)
    found: dict[str, Any] = {
        "onnx_texts_per_s": measure(lambda: onnx.encode_passages(TEXTS, lambda count: None), len(TEXTS))
    }
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    for precision in (EncoderPrecision.FP32, EncoderPrecision.FP16):
        one = TorchEncoder(
            "minilm", model_folder.locate_bundled(), conventions.find_convention("minilm"), precision, device
        )
        vectors = one.encode_passages(TEXTS, lambda count: None)
        alone = np.concatenate([one.encode_queries([text]) for text in TEXTS[:16]])
        found[precision.value] = {
            "least_cosine": float((expected * vectors).sum(1).min()),
            "moved_by_batch": float(np.abs(alone - one.encode_queries(TEXTS[:16])).max()),
            "texts_per_s": measure(lambda held=one: held.encode_passages(TEXTS, lambda count: None), len(TEXTS)),  # type: ignore[misc]
        }
    return found


def main(passages: int, dimension: int, queries: int) -> None:
    vectors, asked = make_vectors(passages, dimension, 1), make_vectors(queries, dimension, 2)
    cells = max(16, passages // 200)
    kinds = {"flat": "Flat", "ivf_flat": f"IVF{cells},Flat", "ivf_sq8": f"IVF{cells},SQ8"}
    reply: dict[str, Any] = {name: compare_index(build(kind, vectors), vectors, asked) for name, kind in kinds.items()}
    if has_cuvs := hasattr(faiss, "GpuIndexCagra") and faiss_gpu.count_devices() > 0:
        reply["cagra"] = compare_index(build_cagra(vectors), vectors, asked)
    reply |= {"encoder": compare_encoders(), "devices": faiss_gpu.count_devices(), "cuda": torch.cuda.is_available()}
    print(json.dumps(reply | {"cuvs": has_cuvs}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
