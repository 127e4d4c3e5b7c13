"""LoRA adapters: published without the model, loaded beside it, and swapped between generations without a pause."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_proto.v1.trajectory_pb2 import Policy
from forage_weights.announcement import PolicyError, describe_policy
from forage_weights.cache import MAX_KEPT
from forage_weights.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from forage_weights.rollout.policy import format_label
from forage_weights.rollout.preparation import verify_finite
from forage_weights.tensors import read_header

Shapes = Mapping[str, tuple[int, ...]]
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_OUTSIDE_LAYERS = ("embed_tokens", "lm_head")
# Options that change the meaning of the two matrices; an adapter must leave them at PEFT's defaults.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "use_dora",
)
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def build_engine_arguments(max_rank: int) -> dict[str, Any]:
    """vLLM's engine arguments for up to `MAX_KEPT` adapters of at most this rank; none where it is 0."""
    if not max_rank:
        return {}
    rank = next((rank for rank in _VLLM_RANKS if rank >= max_rank), max_rank)
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": MAX_KEPT, "max_cpu_loras": MAX_KEPT}


def verify_adapter(policy: Policy, files: list[Path], expected: Shapes, max_rank: int) -> Path:
    """Check configuration and shapes of an adapter whose digests were checked; returns its folder.

    Args:
        expected: tensor name → shape of the model that the engine was started with.

    Raises:
        PolicyError: a file is missing, or the adapter does not fit the model or `max_rank`.
    """
    name = f"{describe_policy(policy)}, an adapter,"
    if {file.name for file in files} != {ADAPTER_CONFIG, ADAPTER_WEIGHTS}:
        listed = sorted(file.name for file in files)
        raise PolicyError(f"{name} lists {listed}: expected {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    folder = files[0].parent
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"{name} has no usable {ADAPTER_CONFIG} ({error!r})") from None
    if not 1 <= rank <= max_rank:
        raise PolicyError(f"{name} has rank {rank}: expected 1 to rollout.engine.max_lora_rank {max_rank}")
    if not alpha:
        raise PolicyError(f"{name} has lora_alpha 0: it would change nothing")
    if config.get("bias", "none") != "none" or any(config.get(key) for key in _UNSUPPORTED):
        unsupported = [key for key in _UNSUPPORTED if config.get(key)] or ["bias"]
        raise PolicyError(f"{name} sets {unsupported[0]}: only plain LoRA matrices can be served")
    try:
        found = read_header(folder / ADAPTER_WEIGHTS)
    except ValueError as error:
        raise PolicyError(f"{name} cannot be read: {error}") from None
    _verify_matrices(name, {tensor: info.shape for tensor, info in found.items()}, expected, rank)
    verify_finite(policy, found, dtype="float32")
    return folder


def _verify_matrices(name: str, found: Shapes, expected: Shapes, rank: int) -> None:
    """Return if every adapted module has both matrices, in the shapes that its weight asks for."""
    sides: dict[str, set[str]] = {}
    for tensor, shape in found.items():
        match = _TENSOR.fullmatch(tensor)
        module = match["module"] if match else ""
        weight = expected.get(f"{module}.weight", ())
        if match is None or len(weight) != 2 or module.rpartition(".")[2] in _OUTSIDE_LAYERS:
            raise PolicyError(f"{name} holds {tensor}: not a LoRA matrix of a linear layer of the model that is served")
        wanted = (rank, weight[1]) if match["side"] == "A" else (weight[0], rank)
        if shape != wanted:
            raise PolicyError(f"{name}: {tensor} has shape {list(shape)}, expected {list(wanted)}")
        sides.setdefault(module, set()).add(match["side"])
    if not sides:
        raise PolicyError(f"{name} holds no matrices")
    if incomplete := sorted(module for module, found_sides in sides.items() if len(found_sides) == 1):
        raise PolicyError(f"{name} has only one of the two matrices of {incomplete[0]}")


@dataclass
class Adapter:
    """A loaded adapter.

    Attributes:
        request: vLLM's `LoRARequest`.
        users: running generations that use it.
    """

    policy: Policy
    request: Any
    users: int = 0


class Adapters:
    """The adapters of one engine. A generation keeps its adapter to its end; replaced ones are removed after the last.

    Args:
        llm: vLLM's AsyncLLM, started with `build_engine_arguments`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._ids = itertools.count(1)
        self._current: Adapter | None = None

    async def load_adapter(
        self, policy: Policy, folder: Path, check: Callable[[Any], Awaitable[None]] | None = None
    ) -> None:
        """Load an adapter for every generation that begins from now on.

        Args:
            check: called with vLLM's `LoRARequest` before any generation uses the adapter; may raise to prevent it.

        Raises:
            PolicyError: vLLM refuses the adapter.
        """
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        request = LoRARequest(lora_name=format_label(policy), lora_int_id=next(self._ids), lora_path=str(folder))
        try:
            await self._llm.add_lora(request)
        except EngineDeadError:
            raise
        except Exception as error:
            raise PolicyError(f"{describe_policy(policy)}: vLLM refuses the adapter ({error})") from error
        if check is not None:
            try:
                await check(request)
            except BaseException:  # also a caller that is cancelled
                await self._llm.remove_lora(request.lora_int_id)
                raise
        old, self._current = self._current, Adapter(policy, request)
        if old is not None:
            await self._remove_unused(old)

    @asynccontextmanager
    async def use_current(self) -> AsyncIterator[Adapter | None]:
        """Hold the current adapter for one generation; None before the first was published."""
        adapter = self._current
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1
            if adapter is not self._current:
                await self._remove_unused(adapter)

    async def _remove_unused(self, adapter: Adapter) -> None:
        if not adapter.users:
            await self._llm.remove_lora(adapter.request.lora_int_id)
