"""The device of the trainer's processes: chosen by `trainer.device` before torch is loaded."""

from __future__ import annotations

import os

from forage_runtime.devices import find_cuda_version, resolve_device
from forage_runtime.errors import UserError
from forage_runtime.settings import TrainerSettings


def prepare_device(trainer: TrainerSettings) -> bool:
    """Whether processes compute on GPUs; on CPUs, GPUs are hidden from this process, which has not loaded torch yet.

    Raises:
        UserError: the installed torch cannot use `trainer.device`.
    """
    on_gpu = resolve_device(trainer.device, "trainer.device")
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return on_gpu


def check_gpus(found: int, needed: int) -> None:
    """Check that this machine has enough GPUs: no others will come.

    Raises:
        UserError: it has too few.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if not found:
        raise UserError(
            f"the installed torch was built for CUDA {find_cuda_version()}, and this machine shows no GPU that it can "
            f"use{where}: 'forage doctor' says what is missing, or set trainer.device=cpu"
        )
    if found < needed:
        raise UserError(
            f"the trainer starts {needed} processes on this machine, each with a GPU, and it shows {found}{where}: "
            "start fewer (trainer.n_gpus_per_node), or show more GPUs"
        )
