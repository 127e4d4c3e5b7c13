"""LoRA adapters: published alone, loaded beside the model, and swapped between generations without a pause."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.weights.filesystem import KEPT
from forage_rollout.weights.policy import SUFFIX, PolicyError, Shapes, described, label, tensor_shapes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_OUTSIDE_LAYERS = ("embed_tokens", "lm_head")
# What gives the two matrices another meaning; an adapter must leave it at PEFT's default.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "use_dora",
)
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def arguments(max_rank: int) -> dict[str, Any]:
    """vLLM's engine arguments for adapters up to this rank, `KEPT` of them at a time; without a rank, none."""
    if not max_rank:
        return {}
    rank = next((rank for rank in _RANKS if rank >= max_rank), max_rank)
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": KEPT, "max_cpu_loras": KEPT}


def verify_adapter(policy: Policy, files: list[Path], expected: Shapes, max_rank: int) -> Path:
    """The folder of an adapter whose digests were checked, after its configuration and shapes were.

    Args:
        expected: `read_model_shapes` of the model that the engine was started with.

    Raises:
        PolicyError: a file is missing, or the adapter does not fit the model or `max_rank`.
    """
    name = f"{described(policy)}, an adapter,"
    if {file.name for file in files} != {CONFIG, WEIGHTS}:
        raise PolicyError(f"{name} lists {sorted(f.name for f in files)}: expected {CONFIG} and {WEIGHTS}")
    folder = files[0].parent
    try:
        config = json.loads((folder / CONFIG).read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"{name} has no usable {CONFIG} ({error!r})") from None
    if not 1 <= rank <= max_rank:
        raise PolicyError(f"{name} has rank {rank}: expected 1 to rollout.engine.max_lora_rank {max_rank}")
    if not alpha:
        raise PolicyError(f"{name} has lora_alpha 0: it would change nothing")
    if config.get("bias", "none") != "none" or any(config.get(key) for key in _UNSUPPORTED):
        odd = [key for key in _UNSUPPORTED if config.get(key)] or ["bias"]
        raise PolicyError(f"{name} sets {odd[0]}: plain LoRA matrices alone can be served")
    _verify_matrices(name, tensor_shapes(policy, [f for f in files if f.suffix == SUFFIX]), expected, rank)
    return folder


def _verify_matrices(name: str, found: Shapes, expected: Shapes, rank: int) -> None:
    """Every adapted module has both matrices, and their shapes are those of its weight."""
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
    if halves := sorted(module for module, both in sides.items() if len(both) == 1):
        raise PolicyError(f"{name} has only one of the two matrices of {halves[0]}")


@dataclass
class Adapter:
    """A loaded adapter.

    Attributes:
        request: vLLM's `LoRARequest`.
        users: generations that run under it.
    """

    policy: Policy
    request: Any
    users: int = 0


class Adapters:
    """The adapters of one engine: a generation ends under the one it began with, which then goes if it is an old one.

    Args:
        llm: vLLM's AsyncLLM, started with `arguments`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._ids = itertools.count(1)
        self._current: Adapter | None = None

    async def load(self, policy: Policy, folder: Path) -> None:
        """Give this adapter to every generation that begins from now on.

        Raises:
            PolicyError: vLLM refuses it.
        """
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        request = LoRARequest(lora_name=label(policy), lora_int_id=next(self._ids), lora_path=str(folder))
        try:
            await self._llm.add_lora(request)
        except EngineDeadError:
            raise
        except Exception as error:
            raise PolicyError(f"{described(policy)}: vLLM refuses the adapter ({error})") from error
        old, self._current = self._current, Adapter(policy, request)
        if old is not None:
            await self._retire(old)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Adapter | None]:
        """The adapter of one generation, kept until it ends; None before the first was published."""
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
                await self._retire(adapter)

    async def _retire(self, adapter: Adapter) -> None:
        if not adapter.users:
            await self._llm.remove_lora(adapter.request.lora_int_id)
