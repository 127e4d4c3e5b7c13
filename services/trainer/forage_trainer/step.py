"""One optimizer step: log-probabilities, reference, values, rewards, advantages, updates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from forage_proto.v1.trajectory_pb2 import Policy
from forage_queue.trainer.batcher import Batch
from forage_runtime.settings import AdvantageEstimator, Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.algorithms.estimators.registry import NonFiniteValueError, Rewards, estimate_advantages
from forage_trainer.algorithms.kl import KlController, apply_kl_penalty
from forage_trainer.algorithms.off_policy import compute_correction_metrics
from forage_trainer.data.digests import digest_tokens
from forage_trainer.data.overlong import mask_cut, subtract_penalties
from forage_trainer.data.tensors import StepTensors, build_step_tensors, leave_out_unusable, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker, UpdateResult
from forage_trainer.reporting.behavior import BehaviorMetrics
from forage_trainer.reporting.metrics import (
    compute_estimate_metrics,
    compute_log_prob_metrics,
    compute_trajectory_metrics,
    to_verl_names,
)
from forage_trainer.reporting.trajectories import StepRecord
from forage_trainer.validation.probe_penalty import ProbePenalty, subtract_penalty

_OF_UPDATE = ("entropy", "grad_norm", "lr", "loss", "clip_fraction", "shared_share")


class Stopwatch:
    """Measures the seconds of each phase, and opens a span for it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, traced: bool = True) -> Iterator[None]:
        """
        Args:
            traced: False for a phase that begins before the step's span is open.
        """
        began = time.perf_counter()
        try:
            with tracing.span(f"trainer.{phase}") if traced else nullcontext():
                yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


class PolicyStep:
    """Turns a batch into an update of the policy.

    kl: the controller of the KL in the reward, which a checkpoint must hold.
    """

    def __init__(
        self, settings: Settings, worker: PolicyWorker, pad_id: int, critic: PolicyWorker | None = None
    ) -> None:
        """
        Raises:
            ValueError: the estimator needs a critic, and there is none.
            SettingsError: as `ProbePenalty`.
        """
        if settings.trainer.algorithm.adv_estimator is AdvantageEstimator.GAE and critic is None:
            raise ValueError("trainer.algorithm.adv_estimator is gae, which needs a critic")
        self._trainer = settings.trainer
        # Not of the groups that came: stragglers that were dropped must not move others to another mini-batch.
        self._batch_size = settings.data.train_batch_size
        self._worker = worker
        self._critic = critic
        self._pad_id = pad_id
        self._behavior = BehaviorMetrics(settings)
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
        """Take one step from `policy`; returns its metrics.

        Args:
            check: called between phases; may raise to abandon the step before any weight has changed.
            on_record: called with the record of the step's trajectories, once the step is taken.
        """
        groups, algorithm = batch.groups, self._trainer.algorithm
        # Of all trajectories, before any is left out: they tell how the policy behaves.
        metrics = compute_trajectory_metrics(groups, policy.version) | batch.metrics | self._behavior.measure(groups)
        groups, left_out = leave_out_unusable(groups, self._trainer)
        batch = batch.with_groups(groups)
        metrics |= left_out | {"tokens_digest": digest_tokens(groups)}
        selected = select_trajectories(groups, algorithm)
        metrics |= {"dead_groups": selected.dead_groups, "filtered_groups": len(selected.filtered)}
        record = StepRecord(batch, selected, policy.version)
        tensors = build_step_tensors(selected, policy.version, policy.epoch, self._pad_id, algorithm)
        if tensors is None:
            which = "valid trajectories of unequal reward" if selected.filtered else "valid trajectories"
            return self._skip_update(record, metrics, f"no group has enough {which}", on_record)
        tensors, overlong = subtract_penalties(tensors, algorithm.overlong)
        metrics |= overlong
        # During the critic's warm-up the actor is not updated, and the same policy is published again.
        updates_actor = policy.version >= self._trainer.critic_warmup
        overconfidence = None
        if self._penalty is not None and updates_actor:
            with clock("probe"):
                overconfidence = self._penalty.measure_overconfidence(selected.trajectories, policy, check)
            metrics |= self._penalty.compute_metrics(overconfidence, selected.trajectories)
        record = replace(record, tensors=tensors, overconfidence=overconfidence)
        try:
            record, estimate_metrics = self._estimate(record, tensors, clock, check, on_record is not None)
        except NonFiniteValueError as error:
            # Nothing may be trained on it. The loss that there is not trips the guard, which decides how to go on.
            return self._skip_update(record, metrics | {"loss": math.nan}, str(error), on_record)
        metrics |= estimate_metrics
        advantages, returns, old = record.advantages, record.returns, record.log_probs
        assert advantages is not None
        assert returns is not None
        if algorithm.overlong.filter:
            trained, metrics["overlong_filtered"] = mask_cut(tensors, record.rows)
            if trained is None:
                return self._skip_update(record, metrics, "a limit cut off every trajectory", on_record)
            tensors = trained
            record = replace(record, tensors=trained)
        if self._critic is not None and record.values is not None:
            with clock("critic"):
                metrics |= self._critic.update_critic(tensors, record.values, returns, self._batch_size)
        if updates_actor:
            with clock("update"):
                result = self._worker.update(tensors, advantages, record.reference, old, self._batch_size)
            entropies = result.entropies if self._takes_one_update else record.entropies
            record = replace(record, log_probs=result.log_probs, entropies=entropies)
            metrics |= self._update_metrics(tensors, record.reference, result)
        if on_record is not None:
            on_record(record)
        return metrics | to_verl_names(metrics)

    def _skip_update(
        self,
        record: StepRecord,
        metrics: dict[str, Any],
        reason: str,
        on_record: Callable[[StepRecord], object] | None,
    ) -> dict[str, Any]:
        names = ("dead_groups", "filtered_groups", "too_long_trajectories", "cut_trajectories")
        unused = {name: metrics[name] for name in names}
        get_logger().warning("step_without_update", batch=record.batch.number, **unused, reason=reason)
        if on_record is not None:
            on_record(StepRecord(record.batch, record.selected, record.version, unused=reason))
        return metrics | to_verl_names(metrics)

    def _estimate(
        self,
        record: StepRecord,
        tensors: StepTensors,
        clock: Stopwatch,
        check: Callable[[], None],
        with_entropies: bool,
    ) -> tuple[StepRecord, dict[str, Any]]:
        """Compute the input of the updates; returns the record with it, and metrics.

        The record's log_probs are those of the policy before any update, None where the settings need none.

        Args:
            with_entropies: whether entropies are wanted; a single update gives them anyway.
        """
        algorithm = self._trainer.algorithm
        old = values = entropies = None
        if algorithm.use_kl_in_reward or not self._takes_one_update:
            with clock("logp"):
                if with_entropies and not self._takes_one_update:
                    old, entropies = self._worker.log_probs_and_entropies(tensors)
                else:
                    old = self._worker.log_probs(tensors)
            check()
        with clock("ref"):
            reference = self._worker.reference_log_probs(tensors)
        check()
        if self._critic is not None:
            with clock("values"):
                values = self._critic.values(tensors)
            check()
        rewards, metrics = tensors.token_rewards, {}
        if algorithm.use_kl_in_reward and old is not None and reference is not None:
            penalized = apply_kl_penalty(rewards, old, reference, tensors.mask, algorithm.kl_penalty, self.kl.beta)
            rewards = penalized.token_rewards
            metrics = {
                "kl_reward": penalized.kl,
                "kl_reward_coef": self.kl.beta,
                "kl_non_finite": penalized.non_finite,
            }
            self.kl.update(penalized.kl, len(tensors.uids))
        estimated = estimate_advantages(
            Rewards(
                token_rewards=rewards,
                mask=tensors.mask,
                uids=tensors.uids,
                turn_ids=tensors.turn_ids,
                turn_rewards=tensors.turn_rewards,
                whole_rewards=tensors.whole_rewards,
                values=values,
                ids=[trajectory.id for trajectory in record.rows],
            ),
            algorithm,
        )
        advantages, returns = estimated.advantages, estimated.returns
        if record.overconfidence is not None:
            coef = algorithm.probe_penalty.coef
            advantages = subtract_penalty(advantages, tensors.state, record.overconfidence, coef)
        metrics |= compute_estimate_metrics(rewards, advantages, returns, values, tensors.mask)
        record = replace(
            record,
            advantages=advantages,
            returns=returns,
            token_rewards=rewards,
            log_probs=old,
            reference=reference,
            values=values,
            entropies=entropies,
        )
        return record, metrics

    @property
    def _takes_one_update(self) -> bool:
        return self._worker.updates_per_step(self._batch_size) == 1

    def _update_metrics(
        self, tensors: StepTensors, reference: torch.Tensor | None, result: UpdateResult
    ) -> dict[str, Any]:
        engine, state = tensors.engine_log_probs, tensors.state
        correction = self._trainer.algorithm.rollout_correction
        return (
            compute_log_prob_metrics(result.log_probs, engine, reference, state, tensors.current)
            | compute_correction_metrics(result.log_probs, engine, state, correction)
            | result.metrics
            | {name: getattr(result, name) for name in _OF_UPDATE}
        )
