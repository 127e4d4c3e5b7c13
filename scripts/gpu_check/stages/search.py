"""The retriever: FAISS on GPUs against the ids of the CPU, its speed and memory; the encoder on torch against ONNX."""

from __future__ import annotations

from typing import Any

from findings import Findings, call_worker

from forage_cli.local.stack import Program

SIZES = {True: (1_000_000, 768, 1_024), False: (50_000, 384, 256)}
"""Passages, dimension and queries, with a GPU and without."""

RECALL = {"flat": 0.999, "ivf_flat": 0.8, "ivf_sq8": 0.8, "cagra": 0.9}
"""Least share of the exact neighbours, on the CPU; a graph's start is random on a GPU, so its ids are not compared."""


def run(findings: Findings) -> None:
    """Search the same indexes on the CPU, on one GPU and on all; encode the same texts with both encoders."""
    found = call_worker(Program.RETRIEVER, "search.py", [str(size) for size in SIZES[findings.has_gpu]])
    for name, least in RECALL.items():
        if name in found:
            findings.check(f"{name}_recall", found[name]["recall"], least=least)
            _check_gpus(findings, name, found[name], found["devices"])
            findings.measure(**{name: found[name]})
    for precision in ("fp32", "fp16"):
        least = found["encoder"][precision].pop("least_cosine")
        findings.check(f"encoder_{precision}_least_cosine", least, least=0.9999)
    findings.measure(encoder=found["encoder"])
    if not findings.has_gpu:
        findings.leave_out("the indexes and the encoder were run on the CPU")
    elif not found["devices"]:
        findings.leave_out("faiss-gpu is not installed in the retriever's environment: the indexes were run on the CPU")
    elif not found["cuvs"]:
        findings.leave_out("faiss-gpu is installed without cuVS: CAGRA was not run")


def _check_gpus(findings: Findings, name: str, index: dict[str, Any], gpus: int) -> None:
    """What one GPU, and all of them, must find; vectors in half precision are scored exactly again."""
    for count in sorted({1, gpus}) if gpus else ():
        on = index.get(f"on_{count}")
        findings.check(f"{name}_is_on_{count}_gpus", on is not None, equal=True)
        if on is None:
            continue
        if name != "cagra":
            # Neighbours whose scores are equal but for rounding may change places.
            findings.check(f"{name}_on_{count}_same_ids", on["same_ids"], least=0.99)
            findings.check(f"{name}_on_{count}_score_difference", on["score_difference"], most=1e-3)
        findings.check(f"{name}_on_{count}_memory_over_estimate", on["used_over_estimate"], most=1.1)
        findings.measure(**{f"{name}_on_{count}_over_cpu": on["queries_per_s"] / index["cpu_queries_per_s"]})
