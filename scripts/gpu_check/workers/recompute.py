"""Log-probabilities of what `sample.py` sampled, by plain forward passes of the model in float32.

`python recompute.py MODEL SAMPLES`: SAMPLES is a file with the reply of `sample.py`. Prints the mean and the largest
absolute difference over all tokens of both passes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main(folder: str, samples: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(device)
    differences = []
    with torch.no_grad():
        for row in json.loads(samples.read_text(encoding="utf-8"))["rows"]:
            for ids, log_probs in (row["first"], row["second"]):
                whole = torch.tensor([row["context"] + ids], device=device)
                logits = model(whole).logits[0, len(row["context"]) - 1 : -1]
                own = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids, device=device)[:, None])[:, 0]
                differences.append((own.cpu() - torch.tensor(log_probs)).abs())
    flat = torch.cat(differences)
    print(json.dumps({"mean": float(flat.mean()), "largest": float(flat.max()), "tokens": len(flat)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
