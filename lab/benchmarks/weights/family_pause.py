"""The pause of a mixture of experts against that of a dense model of as many bytes, side by side on this CPU.

`PYTHONPATH=tests/support .venvs/rollout/bin/python lab/benchmarks/weights/family_pause.py`: two engines in processes of
their own take a load in place in turns. `begin_ms`: the call that builds the twin; `load_s`: until it is loaded and
packed, while the engine may generate; `put_ms`: the call in which the engine stands still for the exchange. Medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from family_serving import ENGINE, poll_until_ready, score, start_engine
from scored_rows import draw_rows
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from forage_rollout.vllm_start.vllm_args import build_environment

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
EXPERTS, WIDTH = 8, 416
ROWS = draw_rows(SHAPE["vocab_size"])
CONFIGS: dict[str, PretrainedConfig] = {
    "dense": Qwen3Config(**SHAPE, intermediate_size=EXPERTS * WIDTH),
    "experts": Qwen3MoeConfig(**SHAPE, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=WIDTH),
}


def load_once(llm: Any, files: list[str], number: int) -> dict[str, float]:
    began = time.perf_counter()
    llm.collective_rpc("begin_policy", args=(number, files, [], f"load {number}"))
    built = time.perf_counter()
    poll_until_ready(llm, number)
    ready = time.perf_counter()
    llm.collective_rpc("put_policy", args=(number,))
    put = time.perf_counter()
    llm.collective_rpc("drop_policy", args=(number,))
    score(llm, ROWS)
    return {"begin_ms": 1e3 * (built - began), "load_s": ready - began, "put_ms": 1e3 * (put - ready)}


def serve(config: PretrainedConfig, folder: Path, pipe: Any) -> None:
    """Answer a pipe: first with the model's bytes, then each number with what the load of that number took."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    files = [*folder.glob("*.safetensors")]
    llm, _ = start_engine(folder)
    score(llm, ROWS)
    pipe.send(sum(file.stat().st_size for file in files))
    while number := pipe.recv():
        pipe.send(load_once(llm, [str(file) for file in files], number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    # Two engines on the same cores: bound, they would share one.
    os.environ |= build_environment(ENGINE) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    context, pipes, sizes = multiprocessing.get_context("fork"), {}, {}
    with tempfile.TemporaryDirectory() as work:
        for name, config in CONFIGS.items():
            pipes[name], there = context.Pipe()
            # PyTorch computes in the children alone: its threads do not outlive a fork.
            context.Process(target=serve, args=(config, Path(work) / name, there), daemon=True).start()
            sizes[name] = pipes[name].recv()
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONFIGS}
        for number in range(1, rounds + 2):
            for name, pipe in pipes.items():
                pipe.send(number)
                found[name].append(pipe.recv())
    medians = {
        name: {key: statistics.median(one[key] for one in loads[1:]) for key in loads[0]}  # the first warms up
        for name, loads in found.items()
    }
    for name, values in medians.items():
        line = {"model": name, "bytes": sizes[name]} | {key: round(value, 3) for key, value in values.items()}
        sys.stdout.write(json.dumps(line) + "\n")
    ratio = medians["experts"]["put_ms"] / medians["dense"]["put_ms"]
    sys.stdout.write(json.dumps({"put_experts_over_dense": round(ratio, 2), "target": 1.2}) + "\n")


if __name__ == "__main__":
    main()
