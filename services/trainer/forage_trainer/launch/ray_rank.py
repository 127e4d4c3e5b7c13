"""One of the trainer's processes as an actor of Ray, in a worker group of verl's."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
import torch

if not torch.cuda.is_available():
    import forage_trainer.engine.verl_cpu  # noqa: F401  (registers the CPU platform)

import structlog
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register

from forage_common.errors import UserError
from forage_common.files.model_folder import check_model_folder
from forage_common.settings import Settings
from forage_common.telemetry import tracing
from forage_common.telemetry.logs import configure_logs
from forage_trainer.run import follow, lead
from forage_trainer.waiting import Stop

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Place:
    """Where a rank runs. node: address; gpu: whether Ray has lent it one."""

    rank: int
    node: str
    host: str
    pid: int
    gpu: bool

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.node}, {self.host})"


def _on_every_rank(method: _Method) -> _Method:
    """Of a group, a method that returns references to what it returns on each rank."""
    found: _Method = register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)(method)
    return found


def _on_rank_0(method: _Method) -> _Method:
    """Likewise, a reference."""
    mode = {"dispatch_mode": Dispatch.ALL_TO_ALL, "execute_mode": Execute.RANK_ZERO}
    found: _Method = register(**mode, blocking=False)(method)
    return found


class Rank(Worker):  # type: ignore[misc, unused-ignore]
    """Leads or follows, as its rank says. It can be asked to stop meanwhile: give the actor two threads."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """
        Args:
            folder: that relative paths of the settings start from.
        """
        super().__init__()  # takes rank and size from what the worker group has put into the environment
        self._settings = settings
        self._folder = folder
        self._stop = Stop()
        gpu = bool(ray.get_gpu_ids())
        self._place = Place(self.rank, ray.util.get_node_ip_address(), socket.gethostname(), os.getpid(), gpu)
        interface = _interface(self._place.node)
        if interface is not None:
            # Gloo's own choice is where the host name leads to, which may be an address that other nodes cannot reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    @_on_every_rank
    def place(self) -> Place:
        return self._place

    @_on_every_rank
    def enter(self) -> None:
        """
        Raises:
            UserError: this node lacks what every rank needs, other than the run's folder.
        """
        try:
            os.chdir(self._folder)
        except OSError as error:
            raise UserError(
                f"{self._place}: no folder {self._folder} ({error.strerror}), where the trainer was started and "
                "relative paths of its settings lead to: start it from a folder that all nodes have"
            ) from None
        try:
            check_model_folder(self._settings.model.path)
        except UserError as error:
            raise UserError(f"{self._place}: {error}") from None
        if self._place.gpu and not torch.cuda.is_available():
            raise UserError(f"{self._place}: Ray has lent it a GPU that its torch cannot use")

    @_on_rank_0
    def put_mark(self, mark: str) -> None:
        """Leave something in the run's folder that other ranks can find there."""
        folder = self._settings.run.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()

    @_on_every_rank
    def find_mark(self, mark: str) -> None:
        """
        Raises:
            UserError: the run's folder is not the one of rank 0.
        """
        if not (self._settings.run.folder / mark).exists():
            raise UserError(
                f"run.dir {self._settings.run.dir.absolute()} is not shared: {self._place} does not see what rank 0 "
                "writes there. Checkpoints are written by all ranks: set run.dir to a file system that all nodes mount"
            )

    @_on_rank_0
    def remove_mark(self, mark: str) -> None:
        """Undo `put_mark`."""
        (self._settings.run.folder / mark).unlink(missing_ok=True)

    @_on_every_rank
    def train(self) -> int:
        """The trainer's program; returns its exit code."""
        configure_logs("trainer")
        structlog.contextvars.bind_contextvars(rank=self._place.rank, node=self._place.node)
        if self._place.rank == 0:
            tracing.start(self._settings, "trainer")
            try:
                return lead(self._settings, self._stop)
            finally:
                tracing.stop()
        follow(self._settings)
        return 0

    @_on_rank_0
    def stop(self) -> None:
        """End at the next safe point; returns at once."""
        self._stop.request()


def _interface(address: str) -> str | None:
    """The network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None
