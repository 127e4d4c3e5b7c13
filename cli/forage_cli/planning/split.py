"""How GPUs of one machine are divided between engines and trainer, and which division is faster."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from forage_cli.planning.changes import apply_changes
from forage_cli.planning.plan import Plan, PlanRequest, make_plan
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import Settings

_SHARE_MARGIN = 0.03
"""Of a GPU's memory that nobody is given where two share it."""
_LARGEST_SHARE = 0.5


@dataclass(frozen=True)
class Split:
    """Numbers of GPUs; in colocated mode both are those of the machine."""

    rollout: int
    trainer: int


def divide(settings: Settings, gpus: int) -> Split:
    """Half for the engines and half for the trainer, an odd one for the trainer.

    Raises:
        UserError: there are too few.
    """
    size = settings.rollout.engine.tensor_parallel_size
    if settings.trainer.placement == "colocated":
        if gpus < size:
            raise UserError(f"rollout.engine.tensor_parallel_size={size} needs {size} GPUs, and there are {gpus}")
        return Split(gpus - gpus % size, gpus)
    if gpus < size + 1:
        raise UserError(
            f"{gpus} GPU(s) are too few for an engine of {size} (rollout.engine.tensor_parallel_size) and a trainer: "
            "set trainer.placement=colocated, which shares them, or add GPUs"
        )
    rollout = max(size, gpus // 2 - gpus // 2 % size)
    return Split(rollout, gpus - rollout)


def apply_split(settings: Settings, split: Split) -> Settings:
    """The settings of a run on one machine with so many GPUs each.

    Raises:
        UserError: the engines' GPUs are no multiple of those of one, or other settings exclude it.
    """
    size = settings.rollout.engine.tensor_parallel_size
    engines, rest = divmod(split.rollout, size)
    if rest or not engines:
        raise UserError(
            f"{split.rollout} GPU(s) for the rollout are no multiple of {size}, which an engine has "
            "(rollout.engine.tensor_parallel_size): change one of them (local.gpus says which GPUs the rollout has)"
        )
    changes = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": split.trainer}
    replicas = {"rollout.engine_replicas.min": engines, "rollout.engine_replicas.max": engines}
    return apply_changes(settings, changes | replicas)


def find_faster_split(settings: Settings, request: PlanRequest, plan: Plan) -> tuple[Split, Plan] | None:
    """The division of the same GPUs whose plan fits and takes the shortest steps; None: it is that of the plan."""
    if plan.is_colocated or settings.trainer.nnodes > 1:
        return None
    size, total = settings.rollout.engine.tensor_parallel_size, plan.gpus
    splits = [Split(own, total - own) for own in range(size, total, size)]
    fitting = []
    for split in splits:
        with suppress(SettingsError):  # other settings exclude it
            found = make_plan(apply_split(settings, split), request)
            fitting += [(split, found)] if found.fits else []
    if not fitting:
        return None
    split, best = min(fitting, key=lambda one: one[1].step.total)
    now = Split(plan.rollout.memory.gpus, plan.trainer.gpus)
    is_better = not plan.fits or best.step.total < 0.98 * plan.step.total
    return (split, best) if is_better and split != now else None


def share_gpu(settings: Settings, request: PlanRequest) -> Settings | None:
    """The settings of a small run whose engine and trainer are on the one GPU at once; None: it is too small for both.

    The engine gets what the trainer leaves of the memory, at most half of it.
    """
    if settings.rollout.engine.tensor_parallel_size > 1:
        return None
    changed = apply_split(settings, Split(1, 1))
    trainer = make_plan(changed, request).trainer
    free = trainer.limit - trainer.total - request.assumed.context  # of the engine's process, outside of its share
    room = math.floor(100 * free / trainer.limit) / 100 - _SHARE_MARGIN
    share = min(settings.rollout.engine.gpu_memory_utilization, _LARGEST_SHARE, round(room, 2))
    if share <= 0:
        return None
    changed = apply_changes(changed, {"rollout.engine.gpu_memory_utilization": share})
    return changed if make_plan(changed, request).rollout.fits else None
