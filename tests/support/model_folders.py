"""The smallest folders that pass for a model, without any ML library."""

from __future__ import annotations

import json
from pathlib import Path


def write_weights(file: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
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
