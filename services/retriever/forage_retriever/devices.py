"""Where this service computes: threads of its CPUs, and the GPUs that CUDA shows to this process."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from forage_runtime.devices import count_cpus, find_cuda_version
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RetrieverSettings
from forage_runtime.telemetry.logs import get_logger

_DRIVER = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_INSTALL = "install those for GPUs with 'make setup DEVICE=gpu'"


@dataclass(frozen=True)
class Shown:
    """What CUDA's driver answers.

    Attributes:
        gpus: how many this process may use.
        cuda: newest CUDA that it runs, 13000 for 13.0; 0 where it does not answer.
        problem: why there is no GPU, in a clause; "" otherwise.
    """

    gpus: int
    cuda: int = 0
    problem: str = ""


def count_threads(settings: RetrieverSettings) -> int:
    """CPU threads of the settings; 0 means the CPUs that this process may use."""
    return settings.threads or count_cpus()


def ask_driver(load: Any = ctypes.CDLL) -> Shown:
    """The GPUs that CUDA shows to this process.

    A driver's files do not tell whether it runs, and FAISS and PyTorch are not asked first: FAISS ends the process
    where the driver fails, and importing PyTorch takes seconds.
    """
    try:
        driver = load(_DRIVER)
    except OSError:
        return Shown(0, problem=f"this machine has no NVIDIA driver ({_DRIVER} is missing)")
    count, version = ctypes.c_int(), ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if not code and not count.value:
        code = _NO_DEVICE
    if code == _NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return Shown(0, problem=f"CUDA shows this process no GPU{hidden}")
    if code:
        return Shown(0, problem=f"CUDA does not start ({_explain(driver, code)})")
    driver.cuDriverGetVersion(ctypes.byref(version))
    return Shown(count.value, version.value)


def find_gpus(settings: RetrieverSettings, faiss_has_gpus: bool | None = None) -> Shown:
    """The GPUs to compute on by `retriever.device`, or why there are none.

    Args:
        faiss_has_gpus: whether FAISS is built for GPUs; None: what is computed there needs no FAISS.

    Raises:
        SettingsError: `retriever.device` is gpu, and none can be used.
    """
    if settings.device == "cpu":
        return Shown(0, problem="retriever.device is cpu")
    shown, cuda = ask_driver(), find_cuda_version()
    problem = shown.problem
    if not problem and not cuda:
        problem = f"the installed PyTorch was built for CPUs ({_INSTALL})"
    elif not problem and shown.cuda // 1000 < int(cuda.partition(".")[0]):
        runs = f"{shown.cuda // 1000}.{shown.cuda % 1000 // 10}"
        problem = f"the driver runs CUDA {runs} and PyTorch was built for {cuda} (install a newer driver)"
    elif not problem and faiss_has_gpus is False:
        problem = f"the installed FAISS was built for CPUs ({_INSTALL})"
    if not problem:
        return shown
    if settings.device == "gpu":
        raise SettingsError(f"retriever.device is gpu, and {problem}: mend that, or set retriever.device=cpu")
    if shown.gpus:
        get_logger().warning("gpus_are_not_used", gpus=shown.gpus, reason=problem)
    return Shown(0, shown.cuda, problem)


def _explain(driver: Any, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()}, error {code}"
