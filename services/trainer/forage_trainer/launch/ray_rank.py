"""One rank of the trainer as a Ray actor, in a worker group of verl."""

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

from forage_runtime.errors import UserError
from forage_runtime.files.model_folder import check_model_folder
from forage_runtime.settings import Settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.logs import configure_logs
from forage_runtime.telemetry.stacks import write_stacks_on_signal
from forage_trainer.run import run_follower, run_leader

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class RankLocation:
    """Where a rank runs. node: its address; gpu: whether Ray assigned a GPU to the rank."""

    rank: int
    node: str
    host: str
    pid: int
    gpu: bool

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.node}, {self.host})"


def _on_every_rank(method: _Method) -> _Method:
    """Make a call of the group run on every rank; it returns a reference to the result of each."""
    registered: _Method = register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)(method)
    return registered


def _on_rank_0(method: _Method) -> _Method:
    """Make a call of the group run on rank 0; it returns a reference to the result."""
    mode = {"dispatch_mode": Dispatch.ALL_TO_ALL, "execute_mode": Execute.RANK_ZERO}
    registered: _Method = register(**mode, blocking=False)(method)
    return registered


class Rank(Worker):  # type: ignore[misc, unused-ignore]
    """Runs the leader (rank 0) or a follower. The actor needs a second thread, for `stop` during `train`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """
        Args:
            folder: base of relative paths in the settings.
        """
        super().__init__()  # reads rank and size from the environment, where the worker group has put them
        self._settings = settings
        self._folder = folder
        self._stop = Stop()
        gpu = bool(ray.get_gpu_ids())
        self._location = RankLocation(self.rank, ray.util.get_node_ip_address(), socket.gethostname(), os.getpid(), gpu)
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address == self._location.node for entry in addresses):
                # Gloo would use the address of the host name, which other nodes may not be able to reach.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    @_on_every_rank
    def locate(self) -> RankLocation:
        return self._location

    @_on_every_rank
    def check_node(self) -> None:
        """Change to the working folder, and check model and GPU of this node.

        Raises:
            UserError: this node lacks one of them.
        """
        try:
            os.chdir(self._folder)
        except OSError as error:
            raise UserError(
                f"{self._location}: no folder {self._folder} ({error.strerror}), where the trainer was started and "
                "relative paths of its settings begin: start it from a folder that all nodes have"
            ) from None
        try:
            check_model_folder(self._settings.model.path)
        except UserError as error:
            raise UserError(f"{self._location}: {error}") from None
        if self._location.gpu and not torch.cuda.is_available():
            raise UserError(f"{self._location}: Ray assigned it a GPU that its torch cannot use")

    @_on_rank_0
    def write_mark(self, mark: str) -> None:
        """Create an empty file in the run's folder, for `check_mark`."""
        folder = self._settings.run.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()

    @_on_every_rank
    def check_mark(self, mark: str) -> None:
        """Check that this node shares the run's folder with rank 0.

        Raises:
            UserError: it does not see the file of `write_mark`.
        """
        if not (self._settings.run.folder / mark).exists():
            raise UserError(
                f"run.dir {self._settings.run.dir.absolute()} is not shared: {self._location} does not see what rank 0 "
                "writes there. Checkpoints are written by all ranks: set run.dir to a file system that all nodes mount"
            )

    @_on_rank_0
    def remove_mark(self, mark: str) -> None:
        """Delete the file of `write_mark`."""
        (self._settings.run.folder / mark).unlink(missing_ok=True)

    @_on_every_rank
    def train(self) -> int:
        """Run the program of this rank; returns its exit code."""
        configure_logs("trainer")
        write_stacks_on_signal()
        structlog.contextvars.bind_contextvars(rank=self._location.rank, node=self._location.node)
        if self._location.rank == 0:
            tracing.start(self._settings, "trainer")
            try:
                return run_leader(self._settings, self._stop)
            finally:
                tracing.stop()
        run_follower(self._settings)
        return 0

    @_on_rank_0
    def stop(self) -> None:
        """Request a stop at the next safe point; returns at once."""
        self._stop.request()
