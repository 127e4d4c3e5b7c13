"""Loading of published policies: checks, one module a transport, LoRA adapters."""

from __future__ import annotations

BACKEND = "forage_file"


def register() -> None:
    """Register our weight-transfer engine with vLLM; repeated calls do nothing.

    vLLM calls this in every process it starts (entry-point group `vllm.general_plugins`).
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "forage_rollout.weights.file_engine", "FileWeightTransferEngine"
        )
