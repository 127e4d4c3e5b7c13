"""vLLM's weight-transfer engine of Forage, inside its workers: safetensors files, loaded in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Safetensors files in Hugging Face's naming, readable by every worker; together they hold the whole model."""

    paths: list[str]


class FileWeights(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Reloads layer by layer from files, on CPU and GPU."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronizes the accelerator without asking whether there is one.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        self.model.load_weights(self._tensors(update_info.paths))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_heads()

    def shutdown(self) -> None:
        pass

    def _tensors(self, paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for path in paths:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is not a dict
                    yield name, file.get_tensor(name)

    def _repack_heads(self) -> None:
        """On CPU the output head multiplies with a packed copy of its weight, made once when a model is loaded.

        A head tied to the embedding has no tensor of its own in the file, so the reload above does not make it again.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
