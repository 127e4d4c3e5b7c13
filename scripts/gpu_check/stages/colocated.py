"""Colocated mode: engine and trainer in turns on the same GPU; memory is freed and taken again, step by step."""

from __future__ import annotations

import json
from typing import Any

from findings import Findings
from whole_runs import FOLDER, check_groups, find_model, run_training

from forage_cli.local.stack import Program

STEPS = 5


def run(findings: Findings) -> None:
    """Train a few steps, and read from the engine's log what it freed for each."""
    model, name = find_model(findings)
    findings.measure(model=name)
    settings = ["trainer.placement=colocated", "trainer.max_staleness=0", "trainer.val_before_train=false"]
    result = run_training("colocated", STEPS, f"model.path={model}", *settings)
    check_groups(findings, "colocated", result, STEPS)
    findings.measure(seconds=result.parts)
    sleeps = _read_log(Program.ROLLOUT, "engine_sleeps")
    findings.check("turns", len(sleeps), least=STEPS)
    findings.check("turns_ended", len(_read_log(Program.ROLLOUT, "engine_wakes")), least=STEPS)
    if findings.has_gpu:
        freed = [sleep["freed_bytes"] for sleep in sleeps]
        findings.measure(freed_gib=[size / 2**30 for size in freed])
        # An engine sleeps with little more than CUDA's own memory: whatever its share was, most of it is freed.
        findings.check("least_share_freed", min(freed) / max(freed), least=0.9)
        findings.check("freed_gib", min(freed) / 2**30, least=1.0)
    else:
        findings.leave_out("the protocol ran on the CPU, where no memory is freed")


def _read_log(program: Program, event: str) -> list[dict[str, Any]]:
    """Read the lines of a service's log with this event."""
    lines = (FOLDER / "colocated/logs" / f"{program}.log").read_text(errors="replace", encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and f'"{event}"' in line]
