"""The trainer's update: CUDA in fp32 and bf16 against the CPU, packed against padded; speed and memory at 0.5B."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from findings import Findings, call_worker, make_model

from forage_cli.local.home import find_home
from forage_cli.local.stack import Program
from forage_cli.planning.assumptions import GIB
from forage_cli.planning.plan import PlanRequest, make_plan
from forage_cli.planning.shapes import read_shape
from forage_runtime.settings import load_settings

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ROWS = (2, 4, 0)
"""Groups, samples a group, and the spread of lengths of lab/benchmarks/trainer."""
TIMED = (4, 4, 2048)
"""Groups, samples, tokens of a trajectory, of the timed update."""
NOT_ALLOCATED = ("CUDA and NCCL", "fragmentation")
"""Parts of a plan that PyTorch's count of allocated memory leaves out."""
COMMON = ("trainer.actor.ppo_mini_batch_size=2", "trainer.actor.optim.clip_grad=1e9", "data.train_batch_size=2",
          "trainer.actor.entropy_coeff=0.001")  # fmt: skip
GRPO = ("trainer.algorithm.adv_estimator=grpo", "trainer.actor.use_kl_loss=true")
PPO = ("trainer.algorithm.adv_estimator=gae", "trainer.actor.use_kl_loss=false")


@dataclass(frozen=True)
class Bounds:
    """Largest differences from the CPU's fp32 update.

    log_prob: mean absolute difference; gradient: of the whole gradient, relative to its length; loss: absolute.
    """

    log_prob: float
    gradient: float
    loss: float


# fp32: other orders of summation only. bf16: 8 bits of mantissa in every product of the passes.
FP32 = Bounds(log_prob=1e-4, gradient=1e-3, loss=1e-4)
BF16 = Bounds(log_prob=3e-2, gradient=1.5e-1, loss=2e-2)


def run(findings: Findings) -> None:
    """Take the same update in every way that this machine has, and compare each with the padded one on the CPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for algorithm, overrides in (("grpo", GRPO), ("ppo", PPO)):
            expected = _update(folder / f"{algorithm}.npz", [*overrides, *_packed(False)], NO_GPU)
            packed = _update(folder / f"{algorithm}-packed.npz", [*overrides, *_packed(True)], NO_GPU)
            _compare(findings, f"{algorithm}_cpu_packed", packed, expected, FP32)
            if not findings.has_gpu:
                continue
            for dtype, bounds in (("fp32", FP32), ("bf16", BF16)):
                for is_packed in (False, True):
                    ways = [*_packed(is_packed), f"trainer.engine.param_dtype={dtype}"]
                    label = f"{algorithm}_cuda_{dtype}_{'packed' if is_packed else 'padded'}"
                    found = _update(folder / f"{label}.npz", [*overrides, *ways], {})
                    _compare(findings, label, found, expected, bounds)
        if findings.has_gpu:
            _time_update(findings, folder)
        else:
            findings.leave_out("the update on CUDA, its speed and its memory were not measured")


def _packed(value: bool) -> list[str]:
    return [f"trainer.engine.use_remove_padding={'true' if value else 'false'}"]


@dataclass(frozen=True)
class Update:
    """The worker's figures and arrays."""

    figures: dict[str, float]
    arrays: dict[str, Any]


def _update(out: Path, overrides: list[str], environment: dict[str, str]) -> Update:
    model = find_home() / "models/tiny-policy"
    figures = call_worker(
        Program.TRAINER,
        "update.py",
        [out, "0", *map(str, ROWS), f"model.path={model}", *COMMON, *overrides],
        environment,
    )
    return Update(figures, dict(np.load(out)))


def _compare(findings: Findings, label: str, found: Update, expected: Update, bounds: Bounds) -> None:
    log_probs = np.abs(found.arrays["log_probs"] - expected.arrays["log_probs"])
    findings.check(f"{label}_log_prob_difference", float(log_probs.mean()), most=bounds.log_prob)
    for part in sorted({name.split("/")[0] for name in expected.arrays if "/" in name} - {"moved"}):
        names = [name for name in expected.arrays if name.startswith(f"{part}/")]
        apart = math.sqrt(sum(float(((found.arrays[n] - expected.arrays[n]) ** 2).sum()) for n in names))
        length = math.sqrt(sum(float((expected.arrays[n] ** 2).sum()) for n in names))
        findings.check(f"{label}_{part}_gradient_difference", apart / length, most=bounds.gradient)
    findings.check(f"{label}_loss_difference", abs(found.figures["loss"] - expected.figures["loss"]), most=bounds.loss)
    # AdamW's first step moves a weight by the learning rate along the sign of its gradient, so weights whose gradient
    # is nearly 0 may move the other way: the share that moves alike is what can be asked for.
    moved = [name for name in expected.arrays if name.startswith("moved/")]
    alike = sum(float((np.sign(found.arrays[n]) == np.sign(expected.arrays[n])).sum()) for n in moved)
    findings.check(f"{label}_weights_moved_alike", alike / sum(expected.arrays[n].size for n in moved), least=0.9)


def _time_update(findings: Findings, folder: Path) -> None:
    """Time updates of a model of the shape of Qwen2.5-0.5B with random weights in bf16, and compare with the plan."""
    model = folder / "model"
    make_model(model)
    groups, samples, length = TIMED
    limits = [f"trainer.actor.ppo_mini_batch_size={groups}", f"data.train_batch_size={groups}",
              f"trainer.actor.ppo_max_token_len_per_gpu={groups * samples * length // 2}",
              "trainer.actor.entropy_coeff=0", "trainer.algorithm.adv_estimator=grpo"]  # fmt: skip
    for packed in (True, False):
        settings = [f"model.path={model}", *limits, *_packed(packed)]
        out = folder / "none"  # without a suffix no arrays are written
        found = call_worker(Program.TRAINER, "update.py", [out, "3", *map(str, TIMED), *settings])
        label = "packed" if packed else "padded"
        speed = found["tokens"] / found["seconds"]
        # 6 operations a parameter and token: 2 forward, 4 backward; what is recomputed does not count.
        flops = 6 * found["parameters"] * speed
        findings.check(f"{label}_loss_is_a_number", math.isfinite(found["loss"]), equal=True)
        findings.measure(**{f"{label}_tokens_per_s": speed, f"{label}_peak_gib": found["peak_gib"]})
        kind = findings.gpus[0].kind
        if kind is None:
            findings.leave_out(f"forage plan does not know {findings.gpus[0].product}: no MFU, no planned memory")
            continue
        findings.measure(**{f"{label}_mfu": flops / kind.flops})
        if packed:
            plan = make_plan(load_settings(overrides=settings, environ={}), PlanRequest(read_shape(model), kind))
            planned = sum(part.size for part in plan.trainer.parts if part.name not in NOT_ALLOCATED) / GIB
            findings.measure(planned_gib=planned)
            findings.check("peak_over_plan", found["peak_gib"] / planned, most=1.15)
