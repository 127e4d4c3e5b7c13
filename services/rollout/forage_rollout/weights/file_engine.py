"""A weight-transfer engine for vLLM's workers that loads safetensors files in place."""

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
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Files need no connection, so there is nothing to initialize."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Safetensors files with Hugging Face's tensor names, readable by every worker, that hold the whole model."""

    paths: list[str]


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):  # type: ignore[misc]
    """Reloads layer by layer from files, on CPU and GPU. vLLM calls the methods in the order of their definition."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would synchronize the accelerator even where there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        self.model.load_weights(self._read_tensors(update_info.paths))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_heads()

    def shutdown(self) -> None:
        pass

    def _read_tensors(self, paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for path in paths:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is not a dict
                    yield name, file.get_tensor(name)

    def _repack_heads(self) -> None:
        """Pack the weight of the output head again.

        On CPU the head multiplies with a packed copy of its weight, which vLLM creates when the model is loaded. A head
        tied to the embedding has no tensor of its own in the file, so the reload does not renew its copy.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
