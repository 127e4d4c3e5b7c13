"""Kinds of GPUs, with the figures of their data sheets; sources and dates are in docs/reference/data.md."""

from __future__ import annotations

from dataclasses import dataclass

from forage_runtime.errors import UserError

MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        memory: bytes, as NVIDIA's driver reports them.
        flops: dense bf16 operations a second, with fp32 accumulation.
        bandwidth: of its memory, bytes a second.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float


def _describe(name: str, memory_mib: int, teraflops: float, gigabytes_s: float) -> Gpu:
    return Gpu(name, memory_mib * MIB, teraflops * 1e12, gigabytes_s * 1e9)


KINDS = {
    gpu.name: gpu
    for gpu in (
        _describe("B200", 183359, 2250, 8000),
        _describe("H200", 143771, 989, 4800),
        _describe("H100", 81559, 989, 3350),
        _describe("H100-PCIe", 81559, 756, 2000),
        _describe("A100-80GB", 81920, 312, 2039),
        _describe("A100-40GB", 40960, 312, 1555),
        _describe("L40S", 46068, 362, 864),
        _describe("A6000", 49140, 155, 768),
        _describe("RTX-5090", 32607, 209, 1792),
        _describe("RTX-4090", 24564, 165, 1008),
        _describe("RTX-3090", 24576, 71, 936),
        _describe("A10", 23028, 125, 600),
        _describe("L4", 23034, 121, 300),
    )
}
"""Name → kind, the largest first."""

DEFAULT = "H100"


def get_gpu(name: str) -> Gpu:
    """The kind of that name, whatever its case.

    Raises:
        UserError: it is not known.
    """
    for known, gpu in KINDS.items():
        if known.lower() == name.lower():
            return gpu
    raise UserError(f"--gpu {name} is not known: choose one of {', '.join(KINDS)}")


def recognize_gpu(product: str, memory_mib: int) -> Gpu | None:
    """The kind of a product that nvidia-smi names, such as "NVIDIA H100 80GB HBM3"; None: unknown.

    Args:
        memory_mib: of this very GPU, which counts.
    """
    words = product.upper().replace("-", " ").split()
    for name, gpu in KINDS.items():
        wanted = [part for part in name.upper().split("-") if part != "40GB"]
        wanted = [part for part in wanted if part != "80GB"]
        if all(any(word == part or word == f"RTX{part}" for word in words) for part in wanted):
            if name == "H100" and "PCIE" in words:
                continue
            if name == "A100-80GB" and memory_mib < 50000:
                continue
            return Gpu(name, memory_mib * MIB, gpu.flops, gpu.bandwidth)
    return None
