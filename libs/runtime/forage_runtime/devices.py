"""Where a service computes, by its settings and the PyTorch that is installed: on GPUs or on CPUs, and on how many."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from forage_runtime.errors import UserError

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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


def count_cpus() -> int:
    """CPUs that this process may use at once: its container's limit to the nearest, or those that it may run on."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([own, *(int(quota + 0.5) for quota in _list_quotas())]))


def _list_quotas() -> Iterator[float]:
    """CPU limits of the control groups that hold this process, from its own up to the one its container can see."""
    try:
        lines = _OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / controllers  # version 2 has one tree, whose name is empty
        # In a container of version 1 the name is that on the host, of which its root is the end.
        own = root / name.lstrip("/") if ".." not in name else root
        for folder in (own, *own.parents):
            if (quota := _read_quota(folder)) is not None:
                yield quota
            if folder == root:
                break


def _read_quota(group: Path) -> float | None:
    """CPUs of one control group; None without a limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such group here, or "max"
        return None
