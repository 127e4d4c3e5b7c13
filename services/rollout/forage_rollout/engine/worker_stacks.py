"""Loaded by vLLM into each of its worker processes, which then show their stacks on a signal like all of ours."""

from __future__ import annotations

from forage_common.telemetry.stacks import write_stacks_on_signal

write_stacks_on_signal()


class WorkerExtension:
    """Adds nothing to vLLM's worker: vLLM imports the module of its `worker_extension_cls`."""
