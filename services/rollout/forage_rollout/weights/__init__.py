"""How new weights reach an engine: one file a transport, LoRA adapters beside them."""

from __future__ import annotations

BACKEND = "forage_file"


def register() -> None:
    """Make our weight-transfer engine known to vLLM; may be called again.

    vLLM calls this in every process it starts (entry-point group `vllm.general_plugins`).
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "forage_rollout.weights.file_engine", "FileWeights")
