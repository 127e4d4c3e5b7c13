"""The smallest folders that pass for a model, without any ML library."""

from __future__ import annotations

import json
from pathlib import Path


def write_weights(file: Path, shapes: dict[str, list[int]], kind: str = "F32") -> None:
    """A safetensors file of zeros.

    Args:
        kind: type of every tensor, by safetensors' name.
    """
    header, end = {}, 0
    for name, shape in shapes.items():
        size = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}[kind]
        for side in shape:
            size *= side
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_smallest_model(parent: Path) -> Path:
    """`parent`/model, complete."""
    model = parent / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    (model / "tokenizer.json").write_text('{"model": {}}')
    (model / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    write_weights(model / "model.safetensors", {"embed": [4, 2], "norm": [2]})
    return model
