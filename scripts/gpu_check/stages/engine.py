"""vLLM: log-probabilities against the trainer's model, pause, prefix cache, CUDA graphs, weight updates under load."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from findings import Findings, call_worker

from forage_cli.local.home import find_home
from forage_cli.local.stack import Program

TOKENS = 64
EAGER = "rollout.engine.args.enforce_eager=true"
SMALL = "rollout.engine.gpu_memory_utilization=0.3"
"""The trainer's worker of the weight updates may be on the same GPU."""


def run(findings: Findings) -> None:
    """Sample in each way of this machine and recompute the log-probabilities; then publish to engines under load."""
    model = find_home() / "models/tiny-policy"
    ways: dict[str, list[str]] = {"eager_fp32": [EAGER, "rollout.engine.dtype=float32"]}
    if findings.has_gpu:
        ways["eager_bf16"] = [EAGER, "rollout.engine.dtype=bfloat16"]
        ways["graphs_bf16"] = ["rollout.engine.dtype=bfloat16"]
    else:
        findings.leave_out("CUDA graphs, bf16 and NCCL were not run")
    speeds = {}
    with tempfile.TemporaryDirectory() as name:
        for way, overrides in ways.items():
            found = call_worker(Program.ROLLOUT, "sample.py", [str(TOKENS), f"model.path={model}", SMALL, *overrides])
            _check_samples(findings, way, found, model, Path(name) / f"{way}.json")
            speeds[way] = found["tokens_per_s"]
    findings.measure(**{f"{way}_tokens_per_s": speed for way, speed in speeds.items()})
    if "graphs_bf16" in speeds:
        findings.measure(graphs_over_eager=speeds["graphs_bf16"] / speeds["eager_bf16"])
    _publish(findings, model)


def _check_samples(findings: Findings, way: str, found: dict[str, Any], model: Path, file: Path) -> None:
    file.write_text(json.dumps(found), encoding="utf-8")
    recomputed = call_worker(Program.TRAINER, "recompute.py", [model, file])
    is_exact = found["dtype"] == "float32"
    findings.check(f"{way}_log_prob_difference", recomputed["mean"], most=1e-4 if is_exact else 3e-2)
    if is_exact:
        findings.check(f"{way}_largest_log_prob_difference", recomputed["largest"], most=1e-3)
    findings.check(f"{way}_cached_prompt_tokens", found["cached_tokens"], least=1)
    findings.measure(**{f"{way}_recomputed_tokens": recomputed["tokens"]})


def _publish(findings: Findings, model: Path) -> None:
    """Publish through every transport while engines sample, with the benchmark of weights."""
    engines = 2 if len(findings.gpus) > 2 or not findings.has_gpu else 1
    command = [str(find_home() / "lab/benchmarks/weights/run"), "--rounds", "1", "--engines", str(engines)]
    command += ["--model", str(findings.model or model), SMALL]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    print(done.stdout, file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"the benchmark of weights ended with {done.returncode}: its messages are above")
    figures = json.loads(lines[-1])
    findings.check("delta_identical", figures["delta_identical"], equal=True)
    findings.measure(
        **{
            name: value
            for name, value in figures.items()
            if name.startswith(("publish_to_served_s", "pause_over_copy", "copy_s", "delta_bytes_share"))
        }
    )
