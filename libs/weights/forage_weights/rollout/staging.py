"""The next policy of a worker of vLLM: made ready by a thread while the worker generates, and then put in place.

On a CPU it takes the place of the served model's tensors (`Shadow`). On a GPU it is loaded, within the pause, into the
tensors of a model that stands still.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from forage_runtime.telemetry.logs import get_logger
from forage_weights.delta import read_positions
from forage_weights.rollout.shadow import Shadow
from forage_weights.tensors import Tensor, read_headers, read_tensor

log = get_logger()
DeltaFiles = tuple[str, Sequence[str]]
"""The delta of a version: the content of the policy that it applies to, and its files."""
_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class Stage:
    """What is made ready for one worker.

    Args:
        worker: vLLM's worker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._job: _Job | None = None
        self._last: _Job | None = None
        self._content = ""
        self._replaced: list[Any] = []

    def begin(self, number: int, files: Sequence[str], deltas: Sequence[DeltaFiles], content: str) -> float:
        """Begin to make a policy ready, in place of any other.

        Args:
            number: the caller's name for this policy.
            files: safetensors files that hold the whole policy.
            deltas: those that lead to the policy, oldest first; they are used where they lead on from what is in use.
            content: digest of the whole policy; empty if unknown.

        Returns:
            Seconds that this took: on a CPU the time of building a `Shadow`, in which the worker stands still.
        """
        began = time.perf_counter()
        self.drop(number)
        policy = _Policy([Path(file) for file in files], deltas, content)
        self._job = _Job(self._worker, number, policy, self._content)
        self._start_when_alone()
        return time.perf_counter() - began

    def poll(self, number: int) -> tuple[bool, str]:
        """Whether the policy may be put in place, and else why it never will be, if that is known."""
        if self._job is None or self._job.number != number:
            return False, "another policy has taken its place"
        self._start_when_alone()
        return self._job.put is not None, self._job.error

    def put(self, number: int) -> None:
        """Put the policy in place. The worker must not generate; after an error it must not go on."""
        job = self._job
        if job is None or job.number != number or job.put is None:
            raise RuntimeError(f"policy {number} is not ready")
        self._content = ""
        with set_current_vllm_config(self._worker.vllm_config), torch.no_grad():
            self._replaced = job.put()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._content, self._job = job.policy.content, None

    def drop(self, number: int) -> None:
        """Free what was replaced, and what was made ready up to this number and not put in place."""
        garbage, self._replaced = self._replaced, []
        if self._job is not None and self._job.number <= number:
            self._job.is_cancelled.set()
            garbage.append(self._job)
            self._job = None
        if self._last is not self._job and self._last is not None and not self._last.is_alive():
            self._last = None
        if garbage:
            # One reference after the other: a large tensor takes milliseconds, in which no token is sampled.
            threading.Thread(target=_free, args=(garbage,), name="free-policy", daemon=True).start()

    def _start_when_alone(self) -> None:
        """Start the job, unless the thread of one that was cancelled is alive.

        Two at once would take the memory of two, and exchange vLLM's current configuration, which is one for all
        threads, under each other.
        """
        if self._job is None or self._job is self._last or (self._last is not None and self._last.is_alive()):
            return
        self._last = self._job
        self._job.begin()


class _CancelledError(Exception):
    """Another policy is wanted."""


@dataclass(frozen=True)
class _Policy:
    files: list[Path]
    deltas: Sequence[DeltaFiles]
    content: str


class _Job(threading.Thread):
    """Makes one policy ready.

    Args:
        base: content of the weights in use.

    Attributes:
        put: puts the policy in place and returns what it replaced; None until then.
        error: why there is nothing to put.
    """

    def __init__(self, worker: Any, number: int, policy: _Policy, base: str) -> None:
        super().__init__(name="stage-policy", daemon=True)
        self.number, self.policy = number, policy
        self.put: Callable[[], list[Any]] | None = None
        self.error = ""
        self.is_cancelled = threading.Event()
        self._worker, self._base = worker, base
        self._is_known = bool(policy.content) and policy.content == base
        self._shadow: Shadow | None = None

    def begin(self) -> None:
        """Start the thread; the worker must stand still, as in all calls by name: see `Shadow`."""
        try:
            if self._worker.device.type == "cpu" and not self._is_known:
                self._shadow = Shadow(self._worker.model_runner.model, self._worker.vllm_config)
        except Exception as error:  # noqa: BLE001 - as in run
            self._fail(error)
        else:
            self.start()

    def run(self) -> None:
        try:
            with set_current_vllm_config(self._worker.vllm_config):
                put = self._prepare()
        except Exception as error:  # noqa: BLE001 - whatever it is, the old policy is served on
            self._fail(error)
        else:
            self.put = None if self.is_cancelled.is_set() else put

    def _fail(self, error: Exception) -> None:
        self.error, self._shadow = f"{type(error).__name__}: {error}", None

    def _prepare(self) -> Callable[[], list[Any]]:
        if self._is_known:
            return list  # the same weights under another version
        model, model_config = self._worker.model_runner.model, self._worker.model_config
        if self._shadow is not None:
            shadow, self._shadow = self._shadow, None
            shadow.load(self._read_tensors())
            return shadow.swap
        patches: list[CheckpointWeightPatch] = []
        changes = _find_changes(self.policy.deltas, self._base)
        if changes and is_patchable(model):
            patches = build_patches(self.policy.files, changes, self._worker.device)

        def put() -> list[Any]:
            try:
                if patches:
                    load_patches(model, patches)
                    return []
            except NotImplementedError as error:
                log.warning("delta_not_applied", detail=str(error))
            load_whole(model, model_config, self.policy.files)
            return []

        return put

    def _read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, info in read_headers(self.policy.files).items():
            if self.is_cancelled.is_set():
                raise _CancelledError
            yield name, to_torch(read_tensor(info))


def to_torch(tensor: Tensor) -> torch.Tensor:
    """The same elements for PyTorch."""
    return torch.from_numpy(tensor.bits).view(_DTYPES[tensor.dtype]).view(tensor.shape)


def build_patches(files: Sequence[Path], changes: Sequence[Path], device: torch.device) -> list[CheckpointWeightPatch]:
    """The elements that any of the deltas changes, with their values in the whole policy."""
    positions: dict[str, list[np.ndarray[Any, Any]]] = {}
    for change in changes:
        for name, found in read_positions(change).items():
            positions.setdefault(name, []).append(found)
    infos, patches = read_headers(files), []
    for name, parts in positions.items():
        indices = torch.from_numpy(parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts)))
        values = to_torch(read_tensor(infos[name])).view(-1)[indices]
        patches.append(
            CheckpointWeightPatch(name, infos[name].shape, values.dtype, values.to(device), indices.to(device))
        )
    return patches


def _find_changes(deltas: Sequence[DeltaFiles], base: str) -> list[Path]:
    """The deltas that lead on from a policy; none where they do not begin with it."""
    begin = next((number for number, delta in enumerate(deltas) if base and delta[0] == base), len(deltas))
    return [Path(file) for _, files in deltas[begin:] for file in files]


def _free(garbage: list[Any]) -> None:
    while garbage:
        garbage.pop()
    # What glibc keeps of a model's size would else count against this process for ever.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of safetensors files as views of the files' pages, so that only what is copied is read."""
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is not a dict
                yield name, opened.get_tensor(name)


def load_whole(model: torch.nn.Module, model_config: ModelConfig, files: Sequence[Path]) -> None:
    """Load all weights, layer by layer and into the tensors in use: a worker copies only its slices to its device."""
    initialize_layerwise_reload(model)
    model.load_weights(map_tensors(files))
    finalize_layerwise_reload(model, model_config)


def is_patchable(model: torch.nn.Module) -> bool:
    """Whether single elements can be replaced: nothing is derived from the weights, or kept in another order."""
    return all(
        isinstance(getattr(module, "quant_method", None), (*_PLAIN, type(None)))
        or not isinstance(module.quant_method, QuantizeMethodBase)
        for module in model.modules()
    ) and all(type(module) is Attention for module in model.modules() if is_deferred_attention_layer(module))


def load_patches(model: torch.nn.Module, patches: Sequence[CheckpointWeightPatch]) -> None:
    """Replace the elements at each tensor's positions, which must not repeat.

    Raises:
        NotImplementedError: the model converts a weight while it loads it; some may already be replaced.
    """
    load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)
