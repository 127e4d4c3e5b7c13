"""Driver, GPUs and CUDA: every installed environment computes on the device what it computes on the CPU."""

from __future__ import annotations

import shutil

from findings import Findings, call_worker, list_gpus

from forage_cli.local.stack import Program, repository


def run(findings: Findings) -> None:
    """Ask the driver, then each environment with GPU packages."""
    gpus = list_gpus()
    findings.measure(
        gpus=[f"{gpu.name}, {gpu.memory_gib:.0f} GiB" for gpu in gpus],
        driver=gpus[0].driver if gpus else "none",
        free_disk_gib=shutil.disk_usage(repository()).free / 2**30,
    )
    for program in (Program.RETRIEVER, Program.ROLLOUT, Program.TRAINER):
        found = call_worker(program, "device.py")
        findings.measure(**{str(program): found["packages"]})
        # 1e-5: sums of 512 products of normal numbers in another order, relative to the largest.
        findings.check(f"{program}_product_error", found["product_error"], most=1e-5)
        if gpus:
            findings.check(f"{program}_uses_cuda", found["cuda"], equal=True)
            findings.check(f"{program}_devices", found["devices"], equal=len(gpus))
    if not gpus:
        findings.lack("no NVIDIA driver and no GPU: nvidia-smi is missing or lists none")
