"""Whole runs of the stack, as `forage demo` makes them."""

from __future__ import annotations

from pathlib import Path

import end_to_end
from end_to_end import EndToEnd
from findings import Findings, make_model
from service import free_base_port

from forage_cli.local.home import find_home

FOLDER = find_home() / "runs/gpu-check"


def run_training(name: str, steps: int, *settings: str, recipe: Path | None = None) -> EndToEnd:
    """Train for so many steps in runs/gpu-check/<name>."""
    return end_to_end.run(FOLDER / name, free_base_port(), steps, *settings, recipe=recipe)


def check_groups(findings: Findings, label: str, run: EndToEnd, steps: int) -> None:
    """Check that every step was taken and no group was lost or trained on twice."""
    findings.check(f"{label}_steps", run.summary["steps"], equal=steps)
    findings.check(f"{label}_groups_lost", run.summary["groups_lost"], equal=0)
    findings.check(f"{label}_groups_twice", run.summary["groups_duplicated"], equal=0)
    findings.measure(**{f"{label}_samples_per_s": run.samples_per_s})


def find_model(findings: Findings) -> tuple[Path, str]:
    """The folder to train and its name: the user's model, SmolLM2-135M, a random one, or on a CPU the tiny policy."""
    if findings.model is not None:
        return findings.model, findings.model.name
    if not findings.has_gpu:
        return find_home() / "models/tiny-policy", "tiny-policy"
    from weights_bench import find_model

    from forage_runtime.errors import UserError

    try:
        return find_model(None), "SmolLM2-135M"
    except UserError as error:
        findings.leave_out(
            f"SmolLM2-135M is not there ({str(error)[:120]}): a random model of 0.5B was trained instead"
        )
    folder = FOLDER / "random-0.5b"
    if not (folder / "config.json").exists():
        make_model(folder)
    return folder, "random weights, 0.5B"
