"""Driver, GPUs and CUDA: every installed environment computes on the device what it computes on the CPU."""

from __future__ import annotations

import shutil

from findings import CUDA_USERS, Findings, call_worker

from forage_cli.local.home import find_home
from forage_cli.local.stack import Program


def run(findings: Findings) -> None:
    """Ask the driver, then each environment with GPU packages."""
    gpus = findings.gpus
    findings.measure(
        gpus=[f"{gpu.product}, {gpu.memory_mib / 1024:.0f} GiB" for gpu in gpus],
        driver=gpus[0].driver if gpus else "none",
        free_disk_gib=shutil.disk_usage(find_home()).free / 2**30,
    )
    for program in (Program.RETRIEVER, Program.ROLLOUT, Program.TRAINER):
        found = call_worker(program, "device.py")
        findings.measure(**{str(program): found["packages"]})
        # 1e-5: sums of 512 products of normal numbers in another order, relative to the largest.
        findings.check(f"{program}_product_error", found["product_error"], most=1e-5)
        if gpus and program in CUDA_USERS:
            findings.check(f"{program}_uses_cuda", found["cuda"], equal=True)
            findings.check(f"{program}_devices", found["devices"], equal=len(gpus))
    if not findings.has_gpu:
        findings.leave_out("every environment computed on the CPU")
