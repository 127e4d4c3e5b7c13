"""`python make_model.py FOLDER SHAPE`: a model of a known shape with random weights, and the tiny policy's tokenizer.

For figures that do not depend on what a model has learned: seconds, memory.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

REPOSITORY = Path(__file__).resolve().parents[3]
SHAPES = {
    # The layers of Qwen2.5-0.5B and 1.5B, from the published config.json of each.
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2},
}  # fmt: skip
VOCABULARY = 151_936


def main(folder: Path, shape: str) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=32_768, dtype=torch.bfloat16,
        **SHAPES[shape],
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for file in (REPOSITORY / "models/tiny-policy").iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(file, folder)
    print(json.dumps({"parameters": sum(parameter.numel() for parameter in model.parameters())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
