"""The platform of a machine without accelerator, for verl's registry; import it before anything of `verl.workers`."""

from __future__ import annotations

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _CpuDevice(ModuleType):
    """The interface that verl expects of `torch.<device>`: torch.cpu, with a device memory of 0 bytes."""

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
    """verl's platform for CPUs."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDevice("forage_cpu_device")

    def is_available(self) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 0

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "FORAGE_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def _do_nothing(self, *_: Any) -> None:
        """A CPU is a single device without an allocator or a profiler, and its calls have finished when they return."""

    set_device = synchronize = set_allocator_settings = empty_cache = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing
