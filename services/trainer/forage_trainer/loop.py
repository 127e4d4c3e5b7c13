"""The training loop: issue prompts, wait for a batch, take a step, publish, save a checkpoint, acknowledge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from forage_proto.v1.trajectory_pb2 import Policy
from forage_queue.streams.client import StreamClient
from forage_queue.trainer import spans
from forage_queue.trainer.batcher import Batch, Batcher
from forage_queue.trainer.feeder import Feeder, make_batches
from forage_queue.trainer.gpu_lease import GpuLease
from forage_records.events import EventKind, EventLog
from forage_records.questions import Questions
from forage_runtime.retries import Retries
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import AdvantageEstimator, Settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.checkpoints.rollbacks import Rollbacks, make_stop_error
from forage_trainer.checkpoints.start import Start
from forage_trainer.checkpoints.writer import CheckpointWriter
from forage_trainer.data.routes import EnvironmentCheck
from forage_trainer.data.tensors import SELECTED_NONE, has_equal_rewards
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.extensions import find_sampler
from forage_trainer.reporting.guards import Guards
from forage_trainer.reporting.journal import Journal, describe_policy
from forage_trainer.reporting.metrics import compute_trajectory_metrics
from forage_trainer.reporting.progress import Phase, StateFile
from forage_trainer.reporting.trajectories import StepFiles, StepRecord
from forage_trainer.step import PolicyStep, Stopwatch
from forage_trainer.validation.evaluation import Validation
from forage_trainer.validation.probe import ValidationProbe
from forage_trainer.validation.schedule import Validations
from forage_trainer.weights.publication import Publication


class TrainingLoop:
    """The training of a run, from its newest checkpoint to its last step or to a stop.

    Args:
        pad_id: token id for padding inside the engine.
        openings: tokens of some prompts; see `Snapshots`.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        worker: PolicyWorker,
        train: Questions,
        validation: Questions,
        pad_id: int,
        stop: Stop,
        health: Health,
        lease: GpuLease | None = None,
        openings: Sequence[Sequence[int]] = (),
    ) -> None:
        folder, trainer = settings.run.folder, settings.trainer
        self._settings, self._streams, self._stop, self._health = settings, streams, stop, health
        # Whatever reads or changes the engine's state holds shared GPUs.
        self._hold: Callable[[], Any] = nullcontext if lease is None else partial(lease.hold, worker)
        self._retries = retries = Retries(stop, health)
        self._state, self._events = StateFile(folder), EventLog(folder)
        self._journal = Journal(settings, retries.disk)
        signatures, hold = RunSignatures(settings.security, settings.run.id), self._hold
        self._publication = Publication(settings, streams, worker, retries, health, hold, signatures, openings, pad_id)
        self._writer = CheckpointWriter(
            settings,
            streams,
            worker,
            train.digest,
            retries,
            hold,
            signatures,
            self._events,
            lambda: self._validations.open_versions,
        )
        self._guards = Guards(trainer.guards)
        batches = make_batches(train.rows, settings, find_sampler(settings))
        check = self._check_environments = EnvironmentCheck(settings, streams, (train, validation), retries.redis, stop)
        equal = partial(has_equal_rewards, estimator=trainer.algorithm.adv_estimator)
        self._feeder = Feeder(settings, streams, batches, retries.redis, equal)
        mend, poll = self._publication.mend, self._poll_in_wait
        self._batcher = Batcher(streams, batches.batch_size, trainer, self._feeder, retries.redis, health, mend, poll)
        has_critic = trainer.algorithm.adv_estimator is AdvantageEstimator.GAE
        self._step = PolicyStep(settings, worker, pad_id, worker if has_critic else None)
        self._step_files = StepFiles(settings)
        shared = self._state, retries, health, mend, check
        build = partial(Validations, settings, lambda questions: Validation(settings, streams, questions, *shared))
        self._validations = build(train.rows, validation.rows, self._record_validation, self._events)
        self._validation_probe = ValidationProbe(settings, validation.rows, self._state) if trainer.probe.freq else None
        self._writer.parts |= {
            "guards": self._guards,
            "kl": self._step.kl,
            **self._validations.parts,
            **self._feeder.parts,
        }
        self._version = 0
        self._replay_until = 0

    def run(self) -> None:
        """Train to `trainer.total_training_steps`.

        Raises:
            Stopped: asked to stop before the end; the next start resumes.
            FencedError: a newer trainer has taken over this run.
            DiskFullError: no disk space, for too long.
            UserError: no disk space at the start, Redis holds another history of this run, or the rollout service has
                other environments.
            BatchTimeoutError: the rollout service gave no trajectories.
            GuardStopError: a guard ended the run.
            RolledBackError: a guard rolled the run back; the next start resumes.
        """
        done = False
        try:
            self._train()
            done = True
        finally:
            if not done:
                self._stop.request()  # ends the waits of a policy that is being published
            self._publication.close()
            self._writer.close(done)
            self._journal.close(done)

    @property
    def step(self) -> int:
        """The last step that was taken."""
        return self._version

    @property
    def _total(self) -> int:
        return self._settings.trainer.total_training_steps

    def _train(self) -> None:
        policy = self._start_run()
        while self._version < self._total:
            policy = self._take_step(policy)
            self._poll()
            self._validate(policy)
        self._validations.end(policy)
        self._batcher.clear()
        self._state.set(Phase.DONE, f"{self._total} steps", self._total, self._total)
        get_logger().info("trainer_done", step=self._version)

    def _start_run(self) -> Policy:
        """Take over the run, go on from its newest checkpoint, and publish the policy that it begins with."""
        self._state.set(Phase.STARTING, "taking over the run")
        self._writer.await_space(self._publication.has_begun)
        self._retries.redis(self._streams.create_groups)
        start = self._writer.take_over(self._publication.find_highest_epoch())
        self._rollbacks = Rollbacks(self._settings.run.folder, self._settings.trainer.guards.max_rollbacks)  # now final
        with self._hold():
            self._resume(start)
            policy = self._publication.publish(self._version)
        self._writer.acknowledge(self._batcher, self._version)
        held = self._batcher.start(max(self._version, self._replay_until), start.replayed, self._rollbacks.slots)
        epoch = self._streams.epoch
        get_logger().info("trainer_started", step=self._version, total=self._total, epoch=epoch, groups_held=held)
        kind = EventKind.START if start.checkpoint is None else EventKind.RESUME
        self._events.append(kind, f"at step {self._version} of {self._total}, as epoch {epoch}", self._version)
        self._health.mark_started()
        if self._version == 0:
            self._validations.begin_first(policy, lambda: self._feeder.issue_up_to_bound(0))
        self._writer.mark_best(self._validations.scores())
        self._validations.resume()
        self._validate(policy)  # the previous process may have died before it began these
        return policy

    def _resume(self, start: Start) -> None:
        self._replay_until = start.acknowledged
        manifest = self._writer.restore(start)
        if manifest is None:
            self._journal.rewind(0)
            return
        self._version = manifest.step
        self._journal.rewind(manifest.step, manifest.figures)

    def _take_step(self, policy: Policy) -> Policy:
        """Receive a batch, train on it, publish the policy, save a checkpoint if one is due; returns the new policy."""
        step = self._version + 1
        began, began_ns, clock = time.perf_counter(), time.time_ns(), Stopwatch()
        self._state.set(Phase.TRAINING, f"step {step}", self._version, self._total)
        batch = self._receive(step, clock)
        with self._hold() as seconds, spans.trace_step(step, batch.groups, began_ns):
            clock.seconds |= seconds or {}
            dropped = self._feeder.find_latest(batch.stragglers)
            metrics = self._train_on(batch, policy, dropped, clock, began)
            metrics["canary_diff"] = self._publication.canary_diff
            self._version = step
            if is_new := step > self._replay_until:
                self._writer.add_step(batch, policy.epoch, dropped)
                self._batcher.mark_consumed(step)
            is_saved = step % self._settings.trainer.save_freq == 0
            must_last = step == self._total or self._validations.is_due(step) or self._is_stream_full()
            with clock("publish"):
                policy = self._publish(is_needed=is_saved or must_last)
            if is_new:
                self._writer.keep_groups(batch)
            build = partial(self._journal.build, step, metrics, clock.seconds)
            line = build(time.perf_counter() - began)
            if not policy.files:
                self._journal.hold(line)
                return policy
            line |= describe_policy(policy)
            if is_saved or must_last:
                with clock("checkpoint"):
                    self._save(line, wait=must_last)
                line |= build(time.perf_counter() - began)
            self._journal.report(line)
            return policy

    def _receive(self, step: int, clock: Stopwatch) -> Batch:
        """Wait for the groups of a step, or read those of one that was acknowledged before a checkpoint was damaged."""
        self._retries.redis(self._streams.offer_payloads)  # Redis may have lost it
        self._feeder.issue_up_to_bound(self._publication.announced)
        with clock("wait", traced=False):
            if step <= self._replay_until:
                return self._writer.read_groups(step)
            batch = self._batcher.next_batch(step, self._settings.trainer.batch_timeout_s)
            self._check_environments()
            return batch

    def _train_on(
        self, batch: Batch, policy: Policy, dropped: tuple[str, ...], clock: Stopwatch, began: float
    ) -> dict[str, Any]:
        """Update the policy; returns the step's metrics. Raises as `_check_guards`."""
        step = batch.number
        self._publication.add_turn(batch.groups)
        on_record = partial(self._write_record, step, dropped) if self._step_files.is_kept(step) else None
        if self._rollbacks.is_skipped(step):
            return self._skip(batch, policy, on_record)
        with self._batcher.assemble_ahead():
            metrics = self._step(batch, policy, clock, self._stop.check, on_record)
        self._check_guards(batch, metrics, clock, began)
        return metrics

    def _skip(self, batch: Batch, policy: Policy, on_record: Callable[[StepRecord], object] | None) -> dict[str, Any]:
        """Consume the groups of a step that a guard has rejected before, without training on them."""
        why = "a guard rolled the run back because of it"
        get_logger().warning("step_skipped", step=batch.number, reason=why)
        self._events.append(EventKind.SKIP, f"trains on nothing: {why}", batch.number)
        if on_record is not None:
            on_record(StepRecord(batch, SELECTED_NONE, policy.version, unused=why))
        metrics = compute_trajectory_metrics(batch.groups, policy.version) | batch.metrics
        return metrics | {"dead_groups": 0, "guards": ["skipped"]}

    def _check_guards(self, batch: Batch, metrics: dict[str, Any], clock: Stopwatch, began: float) -> None:
        """Check a step before its policy is published: no engine ever samples from a policy that a guard rejected.

        Raises:
            GuardStopError, RolledBackError: as the settings of the guard say.
        """
        step, trips = batch.number, self._guards.check(metrics, len(batch.groups))
        metrics["guards"] = [trip.guard for trip in trips]
        if trips:
            self._retries.redis(self._streams.check_epoch)  # what a superseded trainer computes is not the run's
        for trip in trips:
            self._events.append(EventKind.GUARD, f"{trip.guard} ({trip.action}): {trip.reason}", step)
            get_logger().warning("guard_tripped", step=step, guard=trip.guard, action=trip.action, reason=trip.reason)
        if trips and trips[0].action != "warn":
            self._note_announced(self._publication.wait())
            self._writer.wait(self._batcher)
            self._journal.record_untaken(self._journal.build(step, metrics, clock.seconds, time.perf_counter() - began))
            if trips[0].action == "stop":
                raise make_stop_error(step, trips[0])
            raise self._retries.disk(partial(self._rollbacks.roll_back, step, trips[0], batch.reserved))

    def _publish(self, is_needed: bool) -> Policy:
        """Publish the policy beside the next step, or at once where it is needed before; returns what is known of it.

        Refused where a later trainer works: nothing that follows is done then.
        """
        self._note_announced(self._publication.wait())
        trainer = self._settings.trainer
        # What probes sample must be announced before the step that probes.
        has_probes = trainer.probe.freq or trainer.algorithm.probe_penalty.coef
        may_overlap = trainer.max_staleness > 0 and not has_probes and not is_needed
        return (self._publication.begin if may_overlap else self._publication.publish)(self._version)

    def _note_announced(self, policy: Policy | None) -> None:
        """Issue what may be issued once the policy that was begun last is announced, and report its step."""
        if policy is not None:
            self._feeder.issue_up_to_bound(policy.version)
            self._journal.report_held(policy)

    def _save(self, line: dict[str, Any], wait: bool) -> None:
        """Begin a checkpoint; with `wait`, return once it is durable and its groups are acknowledged."""
        self._note_announced(self._publication.wait())
        self._writer.begin(self._version, line, self._batcher, wait)

    def _poll(self) -> None:
        """Take note of what went on beside the training."""
        self._note_announced(self._publication.poll())
        self._validations.poll()
        self._writer.poll(self._batcher)

    def _poll_in_wait(self) -> None:
        """`_poll`, and make room on a stream that got full before the batch was complete: nothing else would."""
        self._poll()
        self._publication.check_refusals()
        if self._writer.has_pending and self._is_stream_full():
            self._note_announced(self._publication.wait())
            self._writer.wait(self._batcher)
            if self._writer.has_pending:
                self._save(self._journal.last, wait=True)

    def _is_stream_full(self) -> bool:
        """Whether trained groups must leave the stream now: at its limit the rollout service pauses."""
        limit = self._retries.redis(self._streams.read_byte_limit)
        return 0 < limit <= self._retries.redis(lambda: self._streams.measure_bytes(self._streams.trajectories))

    def _validate(self, policy: Policy) -> None:
        """Begin the validations of a policy, and probe it, if the schedules say so."""
        self._validations.begin(policy)
        if self._validation_probe is not None and (metrics := self._validation_probe.run(policy, self._stop.check)):
            self._journal.report_probe(policy.version, metrics)

    def _record_validation(self, result: dict[str, Any]) -> None:
        self._journal.report_validation(self._version, result)
        self._writer.mark_best(self._validations.scores())

    def _write_record(self, step: int, dropped: Sequence[str], record: StepRecord) -> None:
        self._retries.redis(self._streams.check_epoch)  # the files are those of the latest trainer
        self._retries.disk(partial(self._step_files.write, step, dropped, record))
