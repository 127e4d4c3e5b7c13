"""`make demo` on the GPU: the tiny policy learns to search, and no group is lost; a few steps of it on a CPU."""

from __future__ import annotations

from findings import Findings
from whole_runs import check_groups, run_training

STEPS = 6
"""On a CPU, where `make demo` itself shows the rest."""


def run(findings: Findings) -> None:
    """Train by the demo's recipe, whole where there is a GPU."""
    from forage_cli.local.home import DEMO, find_home
    from forage_runtime.settings import load_settings

    if not findings.has_gpu:
        check_groups(findings, "demo", run_training("demo", STEPS), STEPS)
        findings.leave_out(f"{STEPS} steps were taken on the CPU; `make demo` shows the whole run")
        return
    steps = load_settings(find_home() / DEMO, environ={}).trainer.total_training_steps
    result = run_training("demo", steps)
    check_groups(findings, "demo", result, steps)
    findings.check("exact_match_gain", result.summary["em_gain"], least=0.2)
    findings.measure(em_before=result.summary["em_before"], em_after=result.summary["em_after"])
    findings.measure(minutes=result.summary["minutes"])
