"""The retriever: FAISS on the GPU against the ids of the CPU and its speed, the encoder on torch against ONNX."""

from __future__ import annotations

from findings import Findings, call_worker

from forage_cli.local.stack import Program

SIZES = {True: (1_000_000, 768, 1_024), False: (50_000, 384, 256)}
"""Passages, dimension and queries, with a GPU and without."""


def run(findings: Findings) -> None:
    """Search the same indexes on both devices; encode the same texts with both encoders."""
    found = call_worker(Program.RETRIEVER, "search.py", [str(size) for size in SIZES[findings.has_gpu]])
    findings.check("flat_recall", found["flat"]["recall"], least=0.999)
    findings.check("ivf_sq8_recall", found["ivf_sq8"]["recall"], least=0.8)
    # Neighbours whose scores are equal but for rounding may change places.
    for name in ("flat", "ivf_sq8"):
        if "same_ids" in found[name]:
            findings.check(f"{name}_same_ids", found[name]["same_ids"], least=0.99)
            findings.check(f"{name}_score_difference", found[name]["score_difference"], most=1e-3)
            speeds = found[name]["gpu_queries_per_s"], found[name]["cpu_queries_per_s"]
            findings.measure(**{f"{name}_gpu_over_cpu": speeds[0] / speeds[1]})
        findings.measure(**{name: found[name]})
    findings.check("encoder_least_cosine", found["encoder"].pop("least_cosine"), least=0.9999)
    findings.measure(encoder=found["encoder"])
    if not findings.has_gpu:
        findings.leave_out("the indexes and the encoder were run on the CPU")
    elif not found["devices"]:
        findings.leave_out("faiss-gpu is not installed in the retriever's environment: the indexes were run on the CPU")
