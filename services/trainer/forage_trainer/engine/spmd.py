"""The trainer as several equal processes (of torchrun or Ray), which repeat the calls of rank 0.

Rank 0 runs the loop, but the engines' collective operations need every process. So each call of a `collective` method
on rank 0 is announced to the others, which make the same call (`follow`). An announcement is a JSON header and plain
tensors, nothing pickled, over a process group of its own. Of a step's rows it has sizes and places alone: every process
reads the tokens of its share from files.

No process waits for another one for ever: each collective operation fails after `trainer.collective_timeout_s`, and so
does the wait for an announcement, because rank 0 announces at least its life while it has nothing else to announce.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import psutil
import torch
import torch.distributed as dist

from forage_runtime.errors import CollectiveTimeoutError
from forage_runtime.telemetry.waits import waiting
from forage_trainer.data.tensors import Rows
from forage_trajectory.trajectory import ColumnFile, ColumnFolder, Columns, StoredColumns

_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
_ALIVE = ""
"""The announcement that rank 0 lives; no method has this name."""
_NAME_BYTES = 128
_START = timedelta(minutes=30)
_SIZES = ("prompts", "responses", "temperatures", "positions")
"""Fields of `Rows` with a number for each row."""
_ALIVE_SHARE = 4
"""Signs of life within one time limit."""


class Processes:
    """The processes of this trainer; construct it by `join`.

    rank: of this process, from 0; size: number of processes.
    columns: where the others read what rank 0 tells them about.
    """

    def __init__(self, rank: int, size: int, timeout_s: float, columns: Path) -> None:
        self.rank = rank
        self.size = size
        self.columns = ColumnFolder(columns)
        self._timeout_s = timeout_s
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if size > 1 else None
        self._rows: Rows | None = None
        self._stored: list[StoredColumns] = []  # their files last as long
        self._peers = self._introduce()
        self._busy = threading.Lock()  # held from an announcement to the end of its call: nothing else may be announced
        self._silent: RuntimeError | None = None
        self._closed = threading.Event()

    @classmethod
    def join(cls, timeout_s: float, columns: Path) -> Processes:
        """Join the processes that a launcher (torchrun, Ray) has started, or be the only one.

        Args:
            timeout_s: time limit of every collective operation.
            columns: a folder that all processes see.
        """
        if not dist.is_initialized():
            _join_group(timedelta(seconds=timeout_s))
        return cls(dist.get_rank(), dist.get_world_size(), timeout_s, columns)

    @property
    def has_followers(self) -> bool:
        """Whether other processes wait for this one's announcements."""
        return self.rank == 0 and self.size > 1

    @contextmanager
    def call_everywhere(self, method: str | None, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Announce a call to the other processes, which make it while this one runs the block; None ends them.

        Raises:
            CollectiveTimeoutError: another process did not take part in time.
        """
        with self._busy, self.limit(method or "the end"):
            if self._silent is not None:
                raise self._silent
            self.announce(method, arguments)
            yield

    def announce_life(self) -> None:
        """From now on, announce on rank 0 that it lives whenever it has nothing else to announce."""
        if self.has_followers:
            threading.Thread(target=self._announce_life, name="signs-of-life", daemon=True).start()

    def close(self) -> None:
        """End the other processes; those that have died cannot receive it."""
        self._closed.set()
        if self.has_followers:
            with suppress(RuntimeError, CollectiveTimeoutError), self.call_everywhere(None, {}):
                pass

    @contextmanager
    def limit(self, what: str) -> Iterator[None]:
        """Name the wait for the other processes, and an operation of theirs that is out of time.

        Raises:
            CollectiveTimeoutError: another process did not take part in time.
        """
        if self.size == 1:
            yield
            return
        others = "the other ranks" if self.rank == 0 else "rank 0"
        with waiting("ranks", on=others, limit_s=self._timeout_s, detail=what):
            try:
                yield
            except RuntimeError as error:
                if _TIMED_OUT.search(str(error)) is None:
                    raise
                raise CollectiveTimeoutError(
                    f"rank {self.rank} waited for {others} in '{what}' for trainer.collective_timeout_s = "
                    f"{self._timeout_s:g} s: {self._describe_peers()}"
                ) from error

    def _introduce(self) -> list[tuple[str, int]]:
        """Exchange (host name, process id) of every rank."""
        if self.size == 1:
            return []
        own = f"{os.getpid()} {socket.gethostname()}".encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
        found = [torch.empty(_NAME_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, torch.frombuffer(bytearray(own), dtype=torch.uint8), group=self._control)
        texts = [bytes(name.tolist()).decode(errors="replace").split() for name in found]
        return [(host, int(pid)) for pid, host in texts]

    def _describe_peers(self) -> str:
        """Describe what is known of the other processes: those of this host may stand still."""
        states = []
        for rank, (host, pid) in enumerate(self._peers):
            if rank == self.rank:
                continue
            state = f"is on {host}"
            if host == socket.gethostname():
                try:
                    state = f"is {psutil.Process(pid).status()}"
                except psutil.Error:
                    state = "has ended"
            states.append(f"rank {rank} (process {pid}) {state}")
        return ", ".join(states)

    def _announce_life(self) -> None:
        while not self._closed.wait(self._timeout_s / _ALIVE_SHARE):  # wait: pause between two signs of life
            if self._busy.acquire(blocking=False):
                try:
                    self.announce(_ALIVE, {})
                except RuntimeError as error:
                    self._silent = error  # for the next call
                    return
                finally:
                    self._busy.release()

    def announce(self, method: str | None, arguments: Mapping[str, Any]) -> None:
        """Announce a call to the other processes; None ends them."""
        tensors: list[torch.Tensor] = []
        shape = next((value.shape for value in arguments.values() if isinstance(value, Rows)), None)
        specification = {
            # Values of all rows stay here: the call itself hands them out.
            name: {"of_rows": _dtype_name(value.dtype)}
            if isinstance(value, torch.Tensor) and value.shape == shape
            else self._pack(value, tensors)
            for name, value in arguments.items()
        }
        header = json.dumps({"method": method, "arguments": specification}).encode()
        self._broadcast(torch.tensor(len(header)))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for tensor in tensors:
            self._broadcast(tensor)

    def receive(self) -> tuple[str | None, dict[str, Any]]:
        """Wait for an announcement: (method, arguments).

        Raises:
            CollectiveTimeoutError: rank 0 gave no sign of life in time.
            RuntimeError: rank 0 died.
        """
        while True:
            with self.limit("the next call"):
                length = torch.tensor(0)
                self._broadcast(length)
                header = torch.empty(int(length), dtype=torch.uint8)
                self._broadcast(header)
                call = json.loads(header.numpy().tobytes())
                if call["method"] != _ALIVE:
                    return call["method"], {name: self._unpack(value) for name, value in call["arguments"].items()}

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over all processes, which must all call it."""
        if self.size > 1:
            dist.all_reduce(values, group=self._control)
        return values

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a CPU tensor to a process that calls `receive_from`."""
        if tensor.numel():
            dist.send(tensor.contiguous(), dst=rank, group=self._control)

    def receive_from(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Receive what a process sends, into a tensor of its type and size, which is returned."""
        if tensor.numel():
            dist.recv(tensor, src=rank, group=self._control)
        return tensor

    def meet(self) -> None:
        """Wait until every process is here."""
        self.sum(torch.zeros(1))

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
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach().cpu().contiguous())
            return {"tensor": {"dtype": _dtype_name(value.dtype), "shape": list(value.shape)}}
        if value is self._rows:
            return {"rows": None}
        self._rows = value
        return {"rows": self._describe(value)}

    def _describe(self, rows: Rows) -> dict[str, Any]:
        """Describe rows in JSON, for `_find_rows`; those that are in no file yet are written into one."""
        here = [one for one in rows.columns if isinstance(one, Columns)]
        written = iter(self.columns.write(here)[0] if here else ())
        self._stored = [next(written) if isinstance(one, Columns) else one for one in rows.columns]
        files = {one.file: None for one in self._stored}
        numbers = {file: number for number, file in enumerate(files)}
        return {
            "files": [str(file.path) for file in files],
            "columns": [[numbers[one.file], one.offset, *one.shape] for one in self._stored],
            "untrained": sorted(rows.untrained),
            **{name: list(getattr(rows, name)) for name in _SIZES},
            **{name: getattr(rows, name) for name in ("pad_id", "state_masking")},
        }

    @staticmethod
    def _find_rows(described: dict[str, Any]) -> Rows:
        files = [ColumnFile(Path(path)) for path in described.pop("files")]
        columns = [
            StoredColumns(files[file], offset, (tokens, runs, sampled))
            for file, offset, tokens, runs, sampled in described.pop("columns")
        ]
        return Rows(columns=columns, untrained=frozenset(described.pop("untrained")), **described)

    def _unpack(self, packed: dict[str, Any]) -> Any:
        ((kind, content),) = packed.items()
        match kind:
            case "path":
                return Path(content)
            case "dtype":
                return _parse_dtype(content)
            case "tensor":
                tensor = torch.empty(content["shape"], dtype=_parse_dtype(content["dtype"]))
                self._broadcast(tensor)
                return tensor
            case "of_rows":
                return torch.empty(0, dtype=_parse_dtype(content))
            case "rows" if content is not None:
                self._rows = self._find_rows(content)
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

    Its arguments may be plain values, paths, dtypes, tensors, and a step's tensors (which arrive as `tensors.Rows`). Of
    values for all rows, (rows, tokens), the others get the type alone, see `verl_worker.hand_out`.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: _W, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not self.processes.has_followers:
            return method(self, *args, **kwargs)
        _, *arguments = signature.bind(self, *args, **kwargs).arguments.items()
        with self.processes.call_everywhere(method.__name__, dict(arguments)):
            return method(self, *args, **kwargs)

    return call


def follow(worker: Collective) -> None:
    """Repeat the calls of rank 0 until it ends.

    Raises:
        CollectiveTimeoutError: another process did not take part in time.
        RuntimeError: rank 0 died, or announced a method that is not collective.
    """
    while True:
        method, arguments = worker.processes.receive()
        if method is None:
            return
        if not hasattr(getattr(type(worker), method, None), "__wrapped__"):
            raise RuntimeError(f"rank 0 announced {method!r}, which is no collective method of {type(worker).__name__}")
        with worker.processes.limit(method):
            getattr(worker, method)(**arguments)


def _join_group(timeout: timedelta) -> None:
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
        store, rank, size = next(dist.rendezvous("env://", timeout=_START))
        _meet(store, rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _meet(store: dist.Store, rank: int, size: int) -> None:
    """Wait until every rank is here: rank 0 comes once it has read the questions and the reward service has answered.

    Raises:
        CollectiveTimeoutError: one did not come.
    """
    store.set(f"rank-{rank}", "here")
    with waiting("all ranks to start", on="the other ranks", limit_s=_START.total_seconds()):
        try:
            store.wait([f"rank-{other}" for other in range(size)], _START)
        except RuntimeError as error:
            raise CollectiveTimeoutError(
                f"rank {rank} waited for the other {size - 1} to start for {_START.total_seconds():g} s: {error}"
            ) from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise RuntimeError(f"rank 0 sent {name!r} where a dtype was expected")
    return dtype
