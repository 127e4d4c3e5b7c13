"""`python make_model.py FOLDER CONFIGURATION`: a Qwen2 model with random weights, and the tiny policy's tokenizer.

CONFIGURATION: values of its config.json, as JSON.

For figures that do not depend on what a model has learned: seconds, memory.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

REPOSITORY = Path(__file__).resolve().parents[3]


def main(folder: Path, values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(max_position_embeddings=32_768, dtype=torch.bfloat16, **values)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for file in (REPOSITORY / "models/tiny-policy").iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(file, folder)
    print(json.dumps({"parameters": sum(parameter.numel() for parameter in model.parameters())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
