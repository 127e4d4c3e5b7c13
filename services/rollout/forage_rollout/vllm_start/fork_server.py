"""vLLM's engine process, forked from a server that imports vLLM while the replica does.

In a Ray actor vLLM starts its engine process from nothing once the replica has imported vLLM, and that process imports
it a second time: a third of an engine's start on a CPU. The server does so at the same time on another core.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any, cast

from forage_rollout.vllm_start.start_errors import record_start_errors
from forage_runtime.files.socket_folder import find_socket_folder

_context = multiprocessing.get_context("forkserver")
_is_prepared = False


class CoreContext:
    """What vLLM uses of a multiprocessing context. Its processes record the error with which they do not start."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def Process(self, *, target: Callable[..., object], name: str, kwargs: dict[str, Any]) -> BaseProcess:
        return cast(BaseProcess, self._context.Process(target=_run, name=name, args=(target,), kwargs=kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class ForkContext(CoreContext):
    """Forks from the server. Processes get this process's environment, not the server's."""

    def __init__(self) -> None:
        super().__init__(_context)

    def Process(self, *, target: Callable[..., object], name: str, kwargs: dict[str, Any]) -> BaseProcess:
        return _context.Process(target=_run_forked, name=name, args=(dict(os.environ), target), kwargs=kwargs)


def prepare_fork() -> None:
    """Start the server. Set vLLM's environment before, and import vLLM after.

    Only for CPUs: what vLLM does to a GPU's driver when it is imported need not survive a fork.
    """
    global _is_prepared
    _context.set_forkserver_preload(["forage_rollout.vllm_start.preload"])
    usual = tempfile.gettempdir()
    tempfile.tempdir = str(find_socket_folder("pymp-12345678/listener-12345678"))  # of the server's socket
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = usual
    _is_prepared = True


def use_own_processes() -> None:
    """Let vLLM start its engine processes by this module: forked, if `prepare_fork` was called, else in its own way."""
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import utils

    utils.get_mp_context = ForkContext if _is_prepared else lambda: CoreContext(get_mp_context())


def _run(target: Callable[..., object], **kwargs: Any) -> None:
    record_start_errors()
    target(**kwargs)


def _run_forked(environment: dict[str, str], target: Callable[..., object], **kwargs: Any) -> None:
    threading.Thread(target=_end_with_replica, name="end-with-replica", daemon=True).start()
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    _run(target, **kwargs)


def _end_with_replica() -> None:
    """End this process when the replica has ended, however: the process is no child of it, and Ray may not know it."""
    replica = multiprocessing.parent_process()
    assert replica is not None
    replica.join()  # wait: the life of the replica
    os._exit(1)
