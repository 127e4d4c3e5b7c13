"""What vLLM's worker processes have from us: our loads of policies, free memory, and their stacks on a signal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forage_rollout.vllm_start.start_errors import record_start_errors
from forage_runtime.telemetry.stacks import write_stacks_on_signal
from forage_weights.rollout.staging import DeltaFiles, Stage

write_stacks_on_signal()
record_start_errors()


class WorkerExtension:
    """Methods that vLLM adds to its worker, for calls by name; see `forage_weights.rollout.staging.Stage`."""

    _policy_stage: Stage | None = None

    def begin_policy(self, number: int, files: Sequence[str], deltas: Sequence[DeltaFiles], content: str) -> float:
        """Begin to make a policy ready; returns the seconds that this worker stood still for it."""
        if self._policy_stage is None:
            self._policy_stage = Stage(self)
        return self._policy_stage.begin(number, files, deltas, content)

    def poll_policy(self, number: int) -> tuple[bool, str]:
        """Whether the policy may be put in place, and else why it never will be, if that is known."""
        assert self._policy_stage is not None
        return self._policy_stage.poll(number)

    def put_policy(self, number: int) -> None:
        """Put the policy in place while nothing is generated."""
        assert self._policy_stage is not None
        self._policy_stage.put(number)

    def measure_free_memory(self) -> int:
        """Bytes that are free on this worker's GPU; 0 on CPU."""
        return int(torch.accelerator.get_memory_info()[0]) if torch.accelerator.is_available() else 0

    def drop_policy(self, number: int) -> None:
        """Free what the policy has replaced, or the policy if it was not put in place."""
        if self._policy_stage is not None:
            self._policy_stage.drop(number)
