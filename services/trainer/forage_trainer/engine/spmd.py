"""The trainer as several equal processes (of torchrun or Ray), which repeat the calls of rank 0.

Rank 0 runs the loop, but the engines' collective operations need every process. So each call of a `collective` method
on rank 0 is announced to the others, which make the same call (`follow`). An announcement is a JSON header and plain
tensors, nothing pickled, over a process group of its own, whose time limit allows for the wait for trajectories.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from forage_trainer.data.tensors import Rows

_TIMEOUT = timedelta(days=30)


class Processes:
    """The processes of this trainer; construct it by `join`.

    rank: of this process, from 0; size: number of processes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._control = dist.new_group(backend="gloo", timeout=_TIMEOUT) if size > 1 else None
        self._rows: Rows | None = None

    @classmethod
    def join(cls) -> Processes:
        """Join the processes that a launcher (torchrun, Ray) has started, or be the only one."""
        if not dist.is_initialized():
            _join_group()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def has_followers(self) -> bool:
        """Whether other processes wait for this one's announcements."""
        return self.rank == 0 and self.size > 1

    def announce(self, method: str | None, arguments: Mapping[str, Any]) -> None:
        """Announce a call to the other processes; None ends them."""
        tensors: list[torch.Tensor] = []
        specification = {name: self._pack(value, tensors) for name, value in arguments.items()}
        header = json.dumps({"method": method, "arguments": specification}).encode()
        self._broadcast(torch.tensor(len(header)))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for tensor in tensors:
            self._broadcast(tensor)

    def receive(self) -> tuple[str | None, dict[str, Any]]:
        """Wait for an announcement: (method, arguments).

        Raises:
            RuntimeError: rank 0 died.
        """
        length = torch.tensor(0)
        self._broadcast(length)
        header = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(header)
        call = json.loads(bytes(header.tolist()))
        return call["method"], {name: self._unpack(value) for name, value in call["arguments"].items()}

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over all processes, which must all call it."""
        if self.size > 1:
            dist.all_reduce(values, group=self._control)
        return values

    def _broadcast(self, tensor: torch.Tensor) -> None:
        flat = tensor.view(-1).view(torch.uint8)
        if flat.numel():
            dist.broadcast(flat, src=0, group=self._control)

    def _pack(self, value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """Describe `value` in JSON, for `_unpack`; its tensors are appended to the list."""
        if value is None or isinstance(value, bool | int | float | str):
            return {"plain": value}
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": _dtype_name(value)}
        if isinstance(value, torch.Tensor) and value.is_nested:
            return {"jagged": [self._pack(part, tensors) for part in (value.values(), value.offsets())]}
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach().cpu().contiguous())
            return {"tensor": {"dtype": _dtype_name(value.dtype), "shape": list(value.shape)}}
        if isinstance(value, TensorDict):
            return {"data": {name: self._pack(value[name], tensors) for name in value.keys()}}  # noqa: SIM118
        if value is self._rows:
            return {"rows": None}
        self._rows = value
        parts = {"data": self._pack(value.data, tensors), "mask": self._pack(value.mask, tensors)}
        return {"rows": parts | {"positions": list(value.positions)}}

    def _unpack(self, packed: dict[str, Any]) -> Any:
        ((kind, content),) = packed.items()
        match kind:
            case "path":
                return Path(content)
            case "dtype":
                return _parse_dtype(content)
            case "jagged":
                return torch.nested.nested_tensor_from_jagged(*(self._unpack(part) for part in content))
            case "tensor":
                tensor = torch.empty(content["shape"], dtype=_parse_dtype(content["dtype"]))
                self._broadcast(tensor)
                return tensor
            case "data":
                values = {name: self._unpack(part) for name, part in content.items()}
                tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
                return tu.get_tensordict(tensors, {name: values[name] for name in values.keys() - tensors.keys()})
            case "rows" if content is not None:
                data, mask = self._unpack(content["data"]), self._unpack(content["mask"])
                self._rows = Rows(data, mask, content["positions"])
                return self._rows
            case "rows":
                return self._rows
        return content


class Collective(Protocol):
    """A class with methods that all processes must call."""

    processes: Processes


_W = TypeVar("_W", bound=Collective)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def collective(method: Callable[Concatenate[_W, _P], _T]) -> Callable[Concatenate[_W, _P], _T]:
    """Decorate a method so that every process calls it when rank 0 does.

    Its arguments may be plain values, paths, dtypes, tensors, and a step's tensors (which arrive as `tensors.Rows`).
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: _W, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self.processes.has_followers:
            _, *arguments = signature.bind(self, *args, **kwargs).arguments.items()
            self.processes.announce(method.__name__, dict(arguments))
        return method(self, *args, **kwargs)

    return call


def follow(worker: Collective) -> None:
    """Repeat the calls of rank 0 until it ends.

    Raises:
        RuntimeError: rank 0 died, or announced a method that is not collective.
    """
    while True:
        method, arguments = worker.processes.receive()
        if method is None:
            return
        if not hasattr(getattr(type(worker), method, None), "__wrapped__"):
            raise RuntimeError(f"rank 0 announced {method!r}, which is no collective method of {type(worker).__name__}")
        getattr(worker, method)(**arguments)


def _join_group() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    launched = "RANK" in os.environ
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if launched:
        dist.init_process_group(backend)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise RuntimeError(f"rank 0 sent {name!r} where a dtype was expected")
    return dtype
