"""What vLLM's engine process imports on a CPU; see `fork_server`. Importing this module takes seconds."""

from __future__ import annotations

import gc
import importlib

from forage_runtime.telemetry.stacks import write_stacks_on_signal

_MODULES = (
    "ray._private.workers.default_worker",  # the main module of the replica, which the engine process imports again
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)

write_stacks_on_signal()  # the signal would end a process that does not expect it
gc.disable()  # what is imported stays: to look for garbage in it takes a fifth of the time
for _module in _MODULES:
    importlib.import_module(_module)
# Finds the place of a process's title while the environment is still beside it.
importlib.import_module("setproctitle").getproctitle()
gc.freeze()
gc.enable()
