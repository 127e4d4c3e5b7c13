"""Where a service computes, by its settings and the PyTorch that is installed: on GPUs or on CPUs."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

from forage_common.errors import UserError


def find_cuda_version(torch: Path | None = None) -> str:
    """The CUDA that PyTorch was built for, found without importing it; empty: it was built for CPUs, or is missing.

    Args:
        torch: its folder; None: that of this environment.
    """
    if torch is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        torch = Path(spec.origin).parent
    file = torch / "version.py"
    return str(runpy.run_path(str(file)).get("cuda") or "") if file.exists() else ""


def resolve_device(device: str, setting: str, torch: Path | None = None) -> bool:
    """Whether a service computes on GPUs; `auto` follows the build of PyTorch, whatever GPUs there are now.

    Args:
        device: auto, cpu or gpu; setting: its name in errors.
        torch: see `find_cuda_version`.

    Raises:
        UserError: GPUs are asked for, and PyTorch was built for CPUs.
    """
    cuda = find_cuda_version(torch)
    if device == "gpu" and not cuda:
        raise UserError(
            f"{setting} is gpu, and the installed PyTorch was built for CPUs: install that for GPUs with "
            f"'make setup DEVICE=gpu', or set {setting}=cpu"
        )
    return device == "gpu" or (device == "auto" and bool(cuda))
