"""verl on a machine without an accelerator, through verl's own registries; import before anything of `verl.workers`.

The engine differs from verl's in how it arranges a batch: rows are sorted by length and cut into micro-batches small
enough for a CPU's caches, padding is on the right under a plain causal mask, and log-probabilities come from one
call over those columns that may hold a response.
"""

from __future__ import annotations

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.plugin.platform import PlatformBase, PlatformRegistry

from forage_common.errors import UserError

CACHE_TOKENS = 2048
"""Padded tokens of a micro-batch. On one core 1k is 15 % slower and 16k a fifth slower; 2k to 4k are equal."""


class _CpuDevice(ModuleType):
    """What verl expects of `torch.<device>`: torch.cpu, with nothing to report about device memory."""

    _NO_BYTES = frozenset({"memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"})
    _NO_EFFECT = frozenset({"empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "synchronize"})

    def __getattr__(self, name: str) -> Any:
        if name in self._NO_BYTES:
            return lambda *_, **__: 0
        if name in self._NO_EFFECT:
            return lambda *_, **__: None
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")  # type: ignore[untyped-decorator, unused-ignore]
class CpuPlatform(PlatformBase):  # type: ignore[misc, unused-ignore]
    """verl's view of the machine."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDevice("forage_cpu_device")

    def is_available(self) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 0

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Calls have finished when they return."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """No device allocator."""

    def empty_cache(self) -> None:
        """No device allocator."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "FORAGE_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine.utils import postprocess_batch_func  # noqa: E402


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row numbers by length, cut so that rows x longest row stays within `budget`; a longer row is alone."""
    cuts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if cuts and (len(cuts[-1]) + 1) * lengths[row] <= budget:
            cuts[-1].append(row)
        else:
            cuts.append([row])
    return cuts


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")  # type: ignore[untyped-decorator, unused-ignore]
class CpuEngine(FSDPEngineWithLMHead):  # type: ignore[misc, unused-ignore]
    """verl's FSDP2 language-model engine for one process on a CPU."""

    def _build_fsdp_module(self, module: Any) -> Any:
        # For a forward-only engine verl asks for pinned memory, which needs an accelerator.
        forward_only = self.engine_config.forward_only
        self.engine_config.forward_only = False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """As verl's, over micro-batches of similar lengths."""
        if dist.get_world_size(self.get_data_parallel_group()) > 1:
            raise UserError(
                "on CPU the trainer is one process, for several would disagree on micro-batches: set WORLD_SIZE=1"
            )
        keep_output = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        tu.assign_non_tensor(
            data, batch_num_tokens=data["loss_mask"].values().sum().item(), dp_size=1, use_dynamic_bsz=True
        )
        lengths = data["input_ids"].offsets().diff().tolist()
        rows = micro_batches(lengths, min(CACHE_TOKENS, data["max_token_len_per_gpu"]))
        outputs = []
        for chosen in rows:
            micro = tu.index_select_tensor_dict(data, chosen)
            with torch.set_grad_enabled(not forward_only):
                loss, output = self.forward_step(micro, loss_function=loss_function, forward_only=forward_only)
                if not forward_only:
                    loss.backward()
            if not keep_output:
                output.pop("model_output", None)
            outputs.append(output)
        return postprocess_batch_func(outputs, rows, data)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Padding on the right is never seen by a real token under a causal mask, so no other mask is needed."""
        pad_id = tu.get_non_tensor_data(micro_batch, "pad_token_id", 0)
        ids = torch.nested.to_padded_tensor(micro_batch["input_ids"], padding=pad_id)
        # The column before the first response token is the first whose logits anything asks for.
        skipped = int(micro_batch["prompts"].offsets().diff().min()) - 1
        inputs = {
            "input_ids": ids,
            "position_ids": torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids),
            "attention_mask": None,
            "logits_to_keep": ids.shape[1] - skipped,
        }
        return inputs, {"input_ids": ids, "skipped": skipped}

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Callable[..., Any] | None,
    ) -> dict[str, torch.Tensor]:
        """Jagged `log_probs` (and `entropy`) as long as `input_ids`; entry i is of token i + 1.

        Entries before the response's first token are 0.
        """
        skipped = output_args["skipped"]
        logits = output.logits[:, :-1]
        labels = output_args["input_ids"][:, skipped + 1 :]
        temperature = micro_batch["temperature"]
        if temperature != 1.0:
            logits = logits / temperature
        every = logits.log_softmax(-1)
        found = {"log_probs": every.gather(-1, labels.unsqueeze(-1)).squeeze(-1)}
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            with torch.set_grad_enabled(
                torch.is_grad_enabled() and tu.get_non_tensor_data(micro_batch, "entropy_gradient", True)
            ):
                found["entropy"] = -(every.exp() * every).sum(-1)
        return {name: _as_jagged(value, skipped, micro_batch["input_ids"]) for name, value in found.items()}


def _as_jagged(values: torch.Tensor, skipped: int, like: torch.Tensor) -> torch.Tensor:
    """(rows, columns after `skipped`) → jagged with the lengths of `like`."""
    full = torch.nn.functional.pad(values, (skipped, 1))
    lengths = like.offsets().diff()
    inside = torch.arange(full.shape[1]).unsqueeze(0) < lengths.unsqueeze(1)
    return torch.nested.nested_tensor_from_jagged(full[inside], like.offsets())
