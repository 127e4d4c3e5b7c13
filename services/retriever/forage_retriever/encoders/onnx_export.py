"""`python -m forage_retriever.encoders.onnx_export encoder|reranker|int8 …`: models as ONNX graphs.

    … encoder MODEL_FOLDER OUT_FOLDER mean|cls unit|raw    texts to vectors [batch, dimension]
    … reranker MODEL_FOLDER OUT_FOLDER                     pairs of texts to scores [batch]
    … int8 EXPORTED_FOLDER OUT_FOLDER                      the same graph with weights in int8

Graphs take `input_ids` and `attention_mask`, rerankers also `token_type_ids` where the model has them, all [batch,
length]. Runs in a child process, so that a retriever that serves does not import torch.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from forage_retriever.encoders import onnx_graph
from forage_retriever.encoders.model_folder import TOKENIZER_FILE
from forage_retriever.encoders.onnx_model import MODEL_FILE

MAX_DIFFERENCE = 1e-4
MIN_COSINE = 0.9
_OPSET = 20


def export_encoder(source: Path, out: Path, pooling: str, length: str) -> None:
    """Write a sentence encoder: the first or the mean of the last hidden states, with or without normalization."""
    import torch
    from transformers import AutoModel

    class Pooled(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            if pooling == "cls":
                pooled = hidden[:, :1]
            else:
                weights = attention_mask.unsqueeze(1).to(hidden.dtype)
                pooled = weights @ hidden / weights.sum(2, keepdim=True)
            # Products rather than sums over an axis: ONNX Runtime adds those up in another order for a batch of one.
            return (pooled / (pooled @ pooled.transpose(1, 2)).sqrt() if length == "unit" else pooled)[:, 0]

    _export_graph(Pooled().eval(), ("input_ids", "attention_mask"), "vectors", source, out)


def export_reranker(source: Path, out: Path) -> None:
    """Write a cross-encoder; its one logit is the score."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)
    if model.config.num_labels != 1:
        raise ValueError(f"it gives {model.config.num_labels} scores, a reranker gives one")
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    if "token_type_ids" in inspect.signature(model.forward).parameters and model.config.type_vocab_size > 1:
        inputs += ("token_type_ids",)

    class Scored(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
            types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            return self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits[:, 0]

    _export_graph(Scored().eval(), inputs, "scores", source, out)


def quantize_exported(exported: Path, out: Path) -> None:
    """Write an exported graph with weights in int8."""
    exact = exported / MODEL_FILE
    onnx.save(onnx_graph.quantize_weights(onnx.load(exact)), out / MODEL_FILE)
    expected, quantized = _run_graph(exact), _run_graph(out / MODEL_FILE)
    if expected.ndim == 2:
        lengths = np.linalg.norm(expected, axis=1) * np.linalg.norm(quantized, axis=1)
        nearest = float(((expected * quantized).sum(1) / lengths).min())
        if nearest < MIN_COSINE:
            raise ValueError(f"int8 turns its vectors to a cosine of {nearest:.2f}: set precision to fp32")
    shutil.copyfile(exported / TOKENIZER_FILE, out / TOKENIZER_FILE)


def _export_graph(model: Any, inputs: tuple[str, ...], output: str, source: Path, out: Path) -> None:
    """Write `model.onnx`, and check it against the model on another shape than the one it was traced with."""
    import torch

    file = out / MODEL_FILE
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    # Separate tensors: export would merge one that is passed twice into one input.
    samples = tuple(torch.ones(2, 16, dtype=torch.long) for _ in inputs)
    torch.onnx.export(
        model,
        samples,
        file,
        input_names=list(inputs),
        output_names=[output],
        dynamo=True,
        opset_version=_OPSET,
        dynamic_shapes=tuple(axes for _ in inputs),
        external_data=False,
        verbose=False,
    )
    onnx.save(onnx_graph.split_layer_norms(onnx.load(file)), file)
    with torch.no_grad():
        expected = model(*(torch.from_numpy(_make_input(name)) for name in inputs)).numpy()
    worst = float(abs(_run_graph(file) - expected).max() / max(abs(expected).max(), 1.0))
    if not worst <= MAX_DIFFERENCE:
        raise ValueError(f"the exported graph differs from the model by {worst:.2g}, more than {MAX_DIFFERENCE}")
    shutil.copyfile(source / TOKENIZER_FILE, out / TOKENIZER_FILE)


def _run_graph(file: Path) -> Any:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return session.run(None, {entry.name: _make_input(entry.name) for entry in session.get_inputs()})[0]


def _make_input(name: str) -> Any:
    values = {
        "input_ids": np.arange(100, 121).reshape(3, 7),
        "attention_mask": np.array([[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6]),
        "token_type_ids": np.array([[0] * 3 + [1] * 4] * 3),
    }
    return values[name].astype(np.int64)


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    command, source, out, *options = sys.argv[1:]
    commands: dict[str, Callable[..., None]] = {
        "encoder": export_encoder,
        "reranker": export_reranker,
        "int8": quantize_exported,
    }
    commands[command](Path(source), Path(out), *options)
