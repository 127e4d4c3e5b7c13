"""Colocated mode: the engine gives its memory to the trainer for the update and takes it again, step by step."""

from __future__ import annotations

from findings import Findings
from whole_runs import check_groups, find_model, run_training

STEPS = 5


def run(findings: Findings) -> None:
    """Train a few steps with engine and trainer in turns on the same device."""
    model, name = find_model(findings)
    findings.measure(model=name)
    settings = ["trainer.placement=colocated", "trainer.max_staleness=0", "trainer.val_before_train=false"]
    result = run_training("colocated", STEPS, f"model.path={model}", *settings)
    check_groups(findings, "colocated", result, STEPS)
    findings.measure(seconds=result.parts)
    if not findings.has_gpu:
        findings.leave_out("the protocol ran on the CPU, where no memory is freed")
