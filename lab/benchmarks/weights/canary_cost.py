"""What the canary costs a load: canary_cost.py [--model FOLDER].

By `PYTHONPATH=tests/support .venvs/rollout/bin/python`.

One engine loads the same two policies again and again, in turns without and with a canary of four rows of 64 tokens,
while it samples (`--running 0`: while it is idle). Prints the median seconds of a load and of its pause, both ways, and
their difference and ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from forage_proto.v1.trajectory_pb2 import Canary, Policy, PolicyFile
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import GenerationRequest
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, SecuritySettings, Settings
from forage_runtime.settings.rollout import WeightSettings
from forage_runtime.telemetry.logs import configure_logs
from forage_weights.digests import compute_digest

REPOSITORY = Path(__file__).resolve().parents[3]
ROWS, TOKENS = 4, 64
MOVE = 1e-3
"""Of each weight's size: how far the second policy is from the first one."""


def write_policies(model: Path, folder: Path) -> list[tuple[Path, Canary]]:
    """The model's policy and one that is a little away from it, with their canaries."""
    import torch
    from scored_rows import build_canary, draw_rows
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = draw_rows(trained.config.vocab_size, [TOKENS] * ROWS)
    found = []
    for name in ("a", "b"):
        target = shutil.copytree(model, folder / name, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
        trained.save_pretrained(target)
        found.append((Path(target), build_canary(trained, rows)))
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(MOVE * parameter.abs().mean())
    return found


def announce(folder: Path, version: int, canary: Canary | None) -> Policy:
    files = [
        PolicyFile(name=file.name, digest=compute_digest(file), bytes=file.stat().st_size)
        for file in sorted(folder.glob("*.safetensors"))
    ]
    return Policy(version=version, epoch=1, uri=str(folder), files=files, canary=canary)


async def sample(engine: VllmEngine) -> None:
    while True:
        await engine.generate(GenerationRequest([5, 6, 7], 200, 1.0, 1.0, -1, None))


async def measure(model: Path, loads: int, running: int, folder: Path) -> dict[str, Any]:
    policies = write_policies(model, folder)
    rollout = RolloutSettings(
        engine=EngineSettings(max_model_len=512, max_num_seqs=64, dtype="float32"),
        weights=WeightSettings(cache_dir=folder / "cache"),
    )
    security = SecuritySettings(allowed_addresses=(str(folder),))
    engine = VllmEngine(Settings(model=ModelSettings(path=model), rollout=rollout, security=security))
    sampling = [asyncio.create_task(sample(engine)) for _ in range(running)]
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    pauses: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(2 * loads + 2):
        target, canary = policies[number % 2]
        way = "with" if number // 2 % 2 else "without"
        policy = announce(target, number + 1, canary if way == "with" else None)
        began = time.perf_counter()
        pause = await engine.load_policy(policy)
        if number >= 2:  # the first two load what no later one needs to
            seconds[way].append(time.perf_counter() - began)
            pauses[way].append(pause)
    failures = engine.counts.canary_failures
    for one in sampling:
        one.cancel()
    engine.shutdown()
    load = {way: statistics.median(found) for way, found in seconds.items()}
    pause_s = {way: statistics.median(found) for way, found in pauses.items()}
    return {
        "model": model.name,
        "running": running,
        "loads_each": loads,
        "load_s": load,
        "pause_s": pause_s,
        "load_with_over_without": load["with"] / load["without"],
        "pause_added_ms": 1000 * (pause_s["with"] - pause_s["without"]),
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models/tiny-policy")
    parser.add_argument("--loads", type=int, default=20, help="loads each way")
    parser.add_argument("--running", type=int, default=8, help="generations that run meanwhile")
    given = parser.parse_args()
    configure_logs("benchmark", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(given.model.resolve(), given.loads, given.running, Path(folder)))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
