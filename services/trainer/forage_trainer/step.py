"""The computation of one optimizer step: log-probabilities, reference, values, rewards, advantages, updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from forage_common.settings import AdvantageEstimator, Settings
from forage_common.telemetry import tracing
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_trainer.algorithms.estimators.registry import Advantages, Rewards, estimate
from forage_trainer.algorithms.kl import KlController, penalised
from forage_trainer.algorithms.off_policy import correction_figures
from forage_trainer.data.batcher import Batch
from forage_trainer.data.selection import selection
from forage_trainer.data.tensors import StepTensors, step_tensors
from forage_trainer.engine.policy_worker import PolicyWorker, UpdateResult
from forage_trainer.reporting.metrics import estimate_figures, log_prob_figures, trajectory_figures, under_verl_names
from forage_trainer.reporting.trajectories import StepRecord
from forage_trainer.validation.probe_penalty import ProbePenalty, less_penalty


class Stopwatch:
    """Seconds by phase, each a span."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, traced: bool = True) -> Iterator[None]:
        """
        Args:
            traced: False where the step's span, of which it is a part, is opened later.
        """
        began = time.perf_counter()
        try:
            with tracing.span(f"trainer.{phase}") if traced else nullcontext():
                yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


class Critic(Protocol):
    """The value model of adv_estimator gae."""

    def values(self, batch: StepTensors) -> torch.Tensor:
        """V of each response token, given those before it, (rows, tokens)."""

    def update_critic(
        self, batch: StepTensors, values: torch.Tensor, returns: torch.Tensor, last_position: int
    ) -> dict[str, float]:
        """Take all updates of one step towards `returns`; figures under verl's names (`critic/…`).

        Args:
            values, returns: (rows, tokens), values as they were before any update of this step.
            last_position: groups in the batch, trained on or not; mini-batches are cut by position.
        """


@dataclass(frozen=True)
class _Estimate:
    """What one step knows before its updates; tensors are (rows, tokens), or None where nothing asked for them."""

    old: torch.Tensor | None
    reference: torch.Tensor | None
    values: torch.Tensor | None
    token_rewards: torch.Tensor
    found: Advantages
    figures: dict[str, Any]


class PolicyStep:
    """Turns a batch into an update of the policy.

    kl: the controller of the KL in the reward, which a checkpoint must hold.
    """

    def __init__(self, settings: Settings, worker: PolicyWorker, pad_id: int, critic: Critic | None = None) -> None:
        """
        Raises:
            ValueError: the estimator needs a critic, and there is none.
            SettingsError: as `ProbePenalty`.
        """
        if settings.trainer.algorithm.adv_estimator is AdvantageEstimator.GAE and critic is None:
            raise ValueError("trainer.algorithm.adv_estimator is gae, which needs a critic")
        self._trainer = settings.trainer
        self._worker = worker
        self._critic = critic
        self._pad_id = pad_id
        self._penalty = ProbePenalty(settings) if settings.trainer.algorithm.probe_penalty.coef else None
        self.kl = KlController(settings.trainer.algorithm.kl_ctrl)

    def __call__(
        self,
        batch: Batch,
        policy: Policy,
        clock: Stopwatch,
        check: Callable[[], None],
        on_record: Callable[[StepRecord], object] | None = None,
    ) -> dict[str, Any]:
        """Take one step from `policy`; returns its figures.

        Args:
            check: called between phases; may raise to abandon the step before anything has changed.
            on_record: told what the step knew of its trajectories, once it is taken.
        """
        groups, algorithm = batch.groups, self._trainer.algorithm
        selected = selection(groups, algorithm)
        figures = (
            trajectory_figures(groups, policy.version)
            | batch.figures
            | {
                "dead_groups": selected.dead_groups,
                "filtered_groups": len(selected.filtered),
            }
        )
        tensors = step_tensors(selected, policy.version, policy.epoch, self._pad_id, algorithm)
        if tensors is None:
            get_logger().warning(
                "step_without_update",
                batch=batch.number,
                dead_groups=selected.dead_groups,
                filtered_groups=len(selected.filtered),
                reason="no group has enough valid trajectories of unequal reward"
                if selected.filtered
                else "no group has enough valid trajectories",
            )
            if on_record is not None:
                on_record(StepRecord(groups, (), policy.version))
            return figures | under_verl_names(figures)
        # Whoever waits for the critic publishes the same policy again.
        learns = policy.version >= self._trainer.critic_warmup
        overconfidence = None
        if self._penalty is not None and learns:
            with clock("probe"):
                overconfidence = self._penalty.overconfidence(selected.trajectories, policy, check)
            figures |= self._penalty.figures(overconfidence, selected.trajectories)
        known = self._estimate(tensors, overconfidence, len(groups), clock, check)
        figures |= known.figures
        if self._critic is not None and known.values is not None:
            with clock("critic"):
                figures |= self._critic.update_critic(tensors, known.values, known.found.returns, len(groups))
        log_probs = known.old
        if learns:
            with clock("update"):
                result = self._worker.update(tensors, known.found.advantages, known.reference, known.old, len(groups))
            log_probs = result.log_probs
            figures |= self._update_figures(tensors, known.reference, result)
        if on_record is not None:
            on_record(
                StepRecord(
                    groups,
                    selected.trajectories,
                    policy.version,
                    tensors,
                    known.found.advantages,
                    known.found.returns,
                    known.token_rewards,
                    log_probs,
                    known.reference,
                    known.values,
                    overconfidence,
                )
            )
        return figures | under_verl_names(figures)

    def _estimate(
        self,
        tensors: StepTensors,
        overconfidence: Sequence[float | None] | None,
        groups: int,
        clock: Stopwatch,
        check: Callable[[], None],
    ) -> _Estimate:
        algorithm = self._trainer.algorithm
        old = values = None
        if algorithm.use_kl_in_reward or self._worker.updates_per_step(groups) > 1:
            with clock("logp"):
                old = self._worker.log_probs(tensors)
            check()
        with clock("ref"):
            reference = self._worker.reference_log_probs(tensors)
        check()
        if self._critic is not None:
            with clock("values"):
                values = self._critic.values(tensors)
            check()
        rewards, figures = tensors.token_rewards, {}
        if algorithm.use_kl_in_reward and old is not None and reference is not None:
            less = penalised(rewards, old, reference, tensors.mask, algorithm.kl_penalty, self.kl.beta)
            rewards = less.token_rewards
            figures = {"kl_reward": less.kl, "kl_reward_coef": self.kl.beta, "kl_non_finite": less.non_finite}
            self.kl.update(less.kl, len(tensors.uids))
        found = estimate(
            Rewards(
                token_rewards=rewards,
                mask=tensors.mask,
                uids=tensors.uids,
                turn_ids=tensors.turn_ids,
                turn_rewards=tensors.turn_rewards,
                whole_rewards=tensors.whole_rewards,
                values=values,
            ),
            algorithm,
        )
        if overconfidence is not None:
            coef = algorithm.probe_penalty.coef
            found = replace(found, advantages=less_penalty(found.advantages, tensors.state, overconfidence, coef))
        figures |= estimate_figures(rewards, found.advantages, found.returns, values, tensors.mask)
        return _Estimate(old, reference, values, rewards, found, figures)

    def _update_figures(
        self, tensors: StepTensors, reference: torch.Tensor | None, result: UpdateResult
    ) -> dict[str, Any]:
        engine, state = tensors.engine_log_probs, tensors.state
        correction = self._trainer.algorithm.rollout_correction
        return (
            log_prob_figures(result.log_probs, engine, reference, state, tensors.current)
            | correction_figures(result.log_probs, engine, state, correction)
            | result.figures
            | {
                "entropy": result.entropy,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "loss": result.loss,
                "clip_fraction": result.clip_fraction,
            }
        )
