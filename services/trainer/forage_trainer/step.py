"""The computation of one optimizer step: log-probabilities, reference, advantages, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forage_common.settings import Settings
from forage_common.telemetry import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_trainer.advantages import grpo_outcome
from forage_trainer.batcher import Batch
from forage_trainer.metrics import log_prob_figures, trajectory_figures
from forage_trainer.policy_worker import PolicyWorker
from forage_trainer.tensors import step_tensors


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


class PolicyStep:
    """Turns a batch into an update of the policy."""

    def __init__(self, settings: Settings, worker: PolicyWorker, pad_id: int) -> None:
        self._settings = settings
        self._worker = worker
        self._pad_id = pad_id

    def __call__(self, batch: Batch, policy: Policy, clock: Stopwatch, check: Callable[[], None]) -> dict[str, Any]:
        """Take one step from `policy`; returns its figures.

        Args:
            check: called between phases; may raise to abandon the step before the policy has changed.
        """
        groups = batch.groups
        figures = trajectory_figures(groups, policy.version)
        tensors, dead = step_tensors(groups, policy.version, policy.epoch, self._pad_id)
        figures |= {"dead_groups": dead, "dropped_stale": batch.stale}
        if tensors is None:
            get_logger().warning(
                "step_without_update", batch=batch.number, reason="no group has two valid trajectories"
            )
            return figures
        old = None
        if self._worker.updates_per_step(len(groups)) > 1:
            with clock("logp"):
                old = self._worker.log_probs(tensors)
            check()
        with clock("ref"):
            reference = self._worker.reference_log_probs(tensors)
        check()
        by_std = self._settings.trainer.algorithm.norm_adv_by_std_in_grpo
        advantages = grpo_outcome(tensors.token_rewards, tensors.mask, tensors.uids, by_std)
        with clock("update"):
            result = self._worker.update(tensors, advantages, reference, old, len(groups))
        return (
            figures
            | log_prob_figures(result.log_probs, tensors.engine_log_probs, reference, tensors.mask, tensors.current)
            | {
                "entropy": result.entropy,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "loss": result.loss,
                "clip_fraction": result.clip_fraction,
                "advantage_abs_mean": float(advantages[tensors.mask.bool()].abs().mean()),
            }
        )
