"""NVIDIA's driver and GPUs of this machine, as nvidia-smi reports them, and what packages for CUDA need of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from forage_cli.local.home import find_home, locate_interpreter
from forage_cli.local.stack import Program
from forage_cli.planning.gpus import Gpu, recognize_gpu
from forage_runtime.devices import find_cuda_version
from forage_runtime.errors import UserError

_Row = TypeVar("_Row")
_TIMEOUT_S = 20.0

# "CUDA minor version compatibility" in the release notes of NVIDIA's CUDA Toolkit: any 13.x runs on the same drivers.
MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major version of the CUDA that packages were built for → major version of the oldest driver that runs them."""
# "Deprecated architectures" there: CUDA 13 has no code for GPUs before Turing.
MINIMUM_CAPABILITY = {11: 3.5, 12: 5.0, 13: 7.5}
"""Major version of CUDA → lowest compute capability of a GPU that it computes on."""


@dataclass(frozen=True)
class LocalGpu:
    """One GPU; its number is that of nvidia-smi, which orders them by their place on the bus.

    Attributes:
        driver: version of the driver, "580.65.06".
        is_sliced: it is divided into MIG devices, of which a process uses one.
    """

    number: int
    uuid: str
    product: str
    memory_mib: int
    driver: str
    is_sliced: bool

    @property
    def kind(self) -> Gpu | None:
        """None: a plan does not know it."""
        return recognize_gpu(self.product, self.memory_mib)


def read_gpus() -> list[LocalGpu]:
    """Every GPU of this machine; empty without nvidia-smi.

    Raises:
        UserError: nvidia-smi fails, as with a driver that does not run.
    """
    rows = _query("index", "uuid", "name", "memory.total", "driver_version", "mig.mode.current")
    return _parse_rows(rows, _parse_gpu)


def list_gpus() -> list[LocalGpu]:
    """The GPUs that this process may use, by CUDA_VISIBLE_DEVICES where that is set.

    Raises:
        UserError: nvidia-smi fails, or a GPU of CUDA_VISIBLE_DEVICES is not there or is a part of one.
    """
    return _choose_visible(read_gpus())


def find_smallest(found: Sequence[LocalGpu]) -> Gpu | None:
    """The kind of the first with the memory of the smallest; None: there is none, or one of an unknown kind."""
    kinds = [kind for gpu in found if (kind := gpu.kind) is not None]
    if not found or len(kinds) < len(found):
        return None
    return replace(kinds[0], memory=min(kind.memory for kind in kinds))


def read_capabilities() -> dict[int, float]:
    """Compute capability of every GPU by its number. Drivers before 510 do not know it.

    Raises:
        UserError: nvidia-smi fails.
    """
    return dict(_parse_rows(_query("index", "compute_cap"), lambda row: (int(row[0]), float(row[1]))))


def find_cuda(program: Program) -> str:
    """The CUDA that PyTorch in a service's environment was built for; empty: it was built for CPUs, or is missing.

    Raises:
        UserError: as `find_home`.
    """
    python = locate_interpreter(program)
    packages = next(python.parents[1].glob("lib/python*/site-packages"), None)
    if packages is not None and (packages / "torch").is_dir():
        return find_cuda_version(packages / "torch")
    # An environment on top of a Python that has torch.
    code = "from forage_runtime.devices import find_cuda_version as find; print(find())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, encoding="utf-8").stdout.strip()


def read_locked_cuda() -> str:
    """The CUDA of the packages that `make setup DEVICE=gpu` installs."""
    lock = (find_home() / "services/rollout/requirements.gpu.lock").read_text(encoding="utf-8")
    [version] = re.findall(r"(?m)^cuda-toolkit==(\d+\.\d+)", lock)
    return str(version)


def get_major(version: str) -> int:
    """The first number of a version."""
    return int(version.partition(".")[0])


def _query(*fields: str) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, encoding="utf-8"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{program} cannot be read ({type(error).__name__}: {error})") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        raise UserError(f"{program} fails: {said}: start NVIDIA's driver")
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _parse_rows(rows: list[list[str]], parse: Callable[[list[str]], _Row]) -> list[_Row]:
    try:
        return [parse(row) for row in rows]
    except (ValueError, IndexError):
        raise UserError(f"nvidia-smi printed what is no list of GPUs ({rows[0]}): run it by hand") from None


def _parse_gpu(row: list[str]) -> LocalGpu:
    number, uuid, product, memory, driver, slices = row
    get_major(driver)
    return LocalGpu(int(number), uuid, product, int(memory), driver, slices == "Enabled")


def _choose_visible(found: list[LocalGpu]) -> list[LocalGpu]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    names = {str(gpu.number): gpu for gpu in found} | {gpu.uuid: gpu for gpu in found}
    chosen = []
    if "MIG-" in visible:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible} is a part of a GPU (MIG), and only whole ones can be divided between "
            "services: start each service by hand with a part of its own"
        )
    for name in filter(None, (part.strip() for part in visible.split(","))):
        if name not in names:
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={visible} names {name}, and nvidia-smi has the GPUs "
                f"{', '.join(str(gpu.number) for gpu in found) or 'none'}: name these"
            )
        chosen.append(names[name])
    return chosen
