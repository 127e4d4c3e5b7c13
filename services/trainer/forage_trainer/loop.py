"""The training loop: issue prompts, wait for a batch, take a step, publish, save a checkpoint, acknowledge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from forage_common.errors import DiskFullError, UnavailableError
from forage_common.security.signatures import RunSignatures
from forage_common.settings import AdvantageEstimator, Settings
from forage_common.stop import Stop
from forage_common.streams.client import StreamClient
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_records.events import EventKind, EventLog
from forage_records.questions import Questions
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.kept_groups import KeptGroups
from forage_trainer.checkpoints.manifest import Stateful, parse_step
from forage_trainer.checkpoints.pending import PendingSteps
from forage_trainer.checkpoints.rollbacks import Rollbacks, make_stop_error
from forage_trainer.checkpoints.start import Start, await_space, take_over
from forage_trainer.checkpoints.upload import Uploader
from forage_trainer.data import spans
from forage_trainer.data.batcher import Batch, Batcher
from forage_trainer.data.dataset import make_batches
from forage_trainer.data.digests import digest_tokens
from forage_trainer.data.feeder import Feeder
from forage_trainer.data.routes import EnvironmentCheck
from forage_trainer.data.selection import SELECTED_NONE
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.reporting.guards import Guards
from forage_trainer.reporting.lines import StepLines, describe_policy
from forage_trainer.reporting.metrics import compute_trajectory_metrics
from forage_trainer.reporting.progress import MetricsFile, Phase, StateFile, replace_non_finite
from forage_trainer.reporting.tracking import Tracker
from forage_trainer.reporting.trajectories import StepFiles, StepRecord
from forage_trainer.shifts import Shifts
from forage_trainer.step import PolicyStep, Stopwatch
from forage_trainer.validation.evaluation import Validation
from forage_trainer.validation.probe import ValidationProbe
from forage_trainer.validation.schedule import Validations
from forage_trainer.waiting import RedisRetry
from forage_trainer.weights.policy_store import PolicyStore
from forage_trainer.weights.publisher import Publisher
from forage_trainer.weights.refusals import Refusals
from forage_trainer.weights.snapshots import Snapshots


class TrainingLoop:
    """The training of a run, from its newest checkpoint to its last step or to a stop."""

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
        shifts: Shifts | None = None,
        openings: Sequence[Sequence[int]] = (),
    ) -> None:
        folder, trainer = settings.run.folder, settings.trainer
        self._settings, self._streams, self._worker = settings, streams, worker
        self._stop, self._health = stop, health
        # Whatever reads or changes the engine's state holds shared GPUs.
        self._hold: Callable[[], Any] = nullcontext if shifts is None else partial(shifts.hold, worker)
        self._retry = RedisRetry(stop, health)
        self._disk = self._retry.disk
        self._data_digest = train.digest
        self._total = trainer.total_training_steps
        self._state, self._metrics_file, self._events = StateFile(folder), MetricsFile(folder), EventLog(folder)
        checkpoints, kept = folder / "checkpoints", trainer.max_ckpt_to_keep
        signatures = RunSignatures(settings.security, settings.run.id)
        self._checkpoints = Checkpoints(checkpoints, kept, worker.parameters, worker.world_size, signatures=signatures)
        self._uploader = Uploader(checkpoints, trainer.upload_url, settings.run.id) if trainer.upload_url else None
        self._guards = Guards(trainer.guards)
        self._policies = PolicyStore(folder / "policies", trainer.publish.uri, settings.run.id, self._retry.storage)
        self._publisher = Publisher.open(settings, self._policies, streams, self._retry, signatures)
        read_dtype = partial(self._retry, streams.read_dtype)
        self._snapshots = Snapshots(settings, worker, read_dtype, self._hold, openings, pad_id)
        # What probes sample must be announced before the step that probes.
        probes = trainer.probe.freq or trainer.algorithm.probe_penalty.coef
        self._overlaps = trainer.max_staleness > 0 and not probes
        self._batches = make_batches(train.rows, settings)
        check = self._check_environments = EnvironmentCheck(settings, streams, (train, validation), self._retry, stop)
        self._feeder = Feeder(settings, streams, self._batches, self._retry)
        size, poll = self._batches.batch_size, self._poll_in_wait
        self._batcher = Batcher(streams, size, trainer, self._feeder, self._retry, health, self._on_silence, poll)
        has_critic = trainer.algorithm.adv_estimator is AdvantageEstimator.GAE
        self._step = PolicyStep(settings, worker, pad_id, worker if has_critic else None)
        self._step_files = StepFiles(settings)
        self._tracker = Tracker(settings)
        self._lines = StepLines(self._metrics_file, self._tracker, self._total, self._disk)
        shared = self._state, self._retry, health, self._on_silence, check
        build = partial(Validations, settings, lambda questions: Validation(settings, streams, questions, *shared))
        self._validations = build(train.rows, validation.rows, self._record_validation, self._events)
        self._validation_probe = ValidationProbe(settings, validation.rows, self._state) if trainer.probe.freq else None
        self._refusals = Refusals(streams, self._retry, health)
        self._version = 0
        self._announced = 0  # version; the one before it while the last one is being published beside a step
        self._unreported: dict[str, Any] = {}
        self._pending = PendingSteps(streams, self._retry)
        self._kept_groups = KeptGroups(checkpoints / "groups")
        self._replay_until = 0
        self._parts: dict[str, Stateful] = {
            "guards": self._guards,
            "kl": self._step.kl,
            **self._validations.parts,
            **self._feeder.parts,
        }

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
            self._publisher.close()
            self._checkpoints.close()
            self._tracker.close(done)
            if self._uploader is not None:
                self._uploader.close(self._settings.trainer.upload_wait_s if done else 0.0)

    @property
    def step(self) -> int:
        """The last step that was taken."""
        return self._version

    def _train(self) -> None:
        self._state.set(Phase.STARTING, "taking over the run")
        has_begun = any((self._settings.run.folder / "policies").glob("v*"))
        await_space(self._checkpoints, has_begun, self._disk)
        self._retry(self._streams.create_groups)
        floor = max(self._checkpoints.highest_epoch(), self._policies.find_highest_epoch())
        start = take_over(self._settings, self._checkpoints, self._kept_groups, self._streams, self._retry, floor)
        self._rollbacks = Rollbacks(self._settings.run.folder, self._settings.trainer.guards.max_rollbacks)  # now final
        with self._hold():
            self._resume(start)
            policy = self._publish()
        self._acknowledge(self._version)
        held = self._batcher.start(max(self._version, self._replay_until), start.replayed, self._rollbacks.places)
        epoch = self._streams.epoch
        get_logger().info("trainer_started", step=self._version, total=self._total, epoch=epoch, groups_held=held)
        kind = EventKind.START if start.checkpoint is None else EventKind.RESUME
        self._events.append(kind, f"at step {self._version} of {self._total}, as epoch {epoch}", self._version)
        self._health.mark_started()
        if self._version == 0:
            self._validations.begin_first(policy, lambda: self._feeder.issue_up_to_bound(0))
        self._disk(lambda: self._checkpoints.mark_best(self._validations.scores()))
        self._validations.resume()
        # The previous process may have died before it began these.
        self._validations.begin(policy)
        self._probe(policy)
        while self._version < self._total:
            policy = self._take_step(policy)
            self._poll()
            self._validations.begin(policy)
            self._probe(policy)
        self._validations.end(policy)
        self._batcher.clear()
        self._state.set(Phase.DONE, f"{self._total} steps", self._total, self._total)
        get_logger().info("trainer_done", step=self._version)

    def _take_step(self, policy: Policy) -> Policy:
        step = self._version + 1
        began, began_ns, clock = time.perf_counter(), time.time_ns(), Stopwatch()
        self._state.set(Phase.TRAINING, f"step {step}", self._version, self._total)
        self._retry(self._streams.offer_payloads)  # Redis may have lost it
        self._feeder.issue_up_to_bound(self._announced)
        with clock("wait", traced=False):
            if step <= self._replay_until:
                batch = self._kept_groups.read(step)
            else:
                batch = self._batcher.next_batch(step, self._settings.trainer.batch_timeout_s)
                self._check_environments()
        with self._hold() as seconds, spans.trace_step(step, batch.groups, began_ns):
            clock.seconds |= seconds or {}
            return self._train_on(batch, policy, clock, began)

    def _train_on(self, batch: Batch, policy: Policy, clock: Stopwatch, began: float) -> Policy:
        step, late = batch.number, self._feeder.find_latest(batch.stragglers)
        self._snapshots.add_turn(batch.groups)
        on_record = partial(self._write_record, step, late) if self._step_files.is_kept(step) else None
        if self._rollbacks.is_skipped(step):
            why = "a guard rolled the run back because of it"
            get_logger().warning("step_skipped", step=step, reason=why)
            self._events.append(EventKind.SKIP, f"trains on nothing: {why}", step)
            metrics = compute_trajectory_metrics(batch.groups, policy.version) | batch.metrics
            metrics |= {"dead_groups": 0, "guards": ["skipped"]}
            if on_record is not None:
                on_record(StepRecord(batch, SELECTED_NONE, policy.version, unused=why))
        else:
            with self._batcher.assemble_ahead():
                metrics = self._step(batch, policy, clock, self._stop.check, on_record)
            metrics["tokens_digest"] = digest_tokens(batch.groups)
            self._check_guards(batch, metrics, clock, began)
        self._version = step
        if step > self._replay_until:
            self._pending.add(batch, policy.epoch, late)
            self._batcher.mark_consumed(step)
        is_saved = step % self._settings.trainer.save_freq == 0
        must_last = step == self._total or self._validations.is_due(step) or self._is_stream_full()
        with clock("publish"):
            self._settle_policy(wait=True)
            # Refused where a later trainer works: nothing below is done then.
            policy = self._begin_policy() if self._overlaps and not (is_saved or must_last) else self._publish()
        if step > self._replay_until and self._settings.trainer.max_ckpt_to_keep > 1:
            self._disk(partial(self._kept_groups.write, batch))
        line = self._lines.build(step, metrics, clock.seconds, time.perf_counter() - began)
        if not policy.files:
            self._unreported = line
            return policy
        line |= describe_policy(policy)
        if is_saved or must_last:
            with clock("checkpoint"):
                self._save_checkpoint(line, wait=must_last)
            line |= self._lines.build(step, metrics, clock.seconds, time.perf_counter() - began)
        self._lines.report(line)
        return policy

    def _write_record(self, step: int, late: Sequence[str], record: StepRecord) -> None:
        self._retry(self._streams.check_epoch)  # the files are those of the latest trainer
        self._disk(partial(self._step_files.write, step, late, record))

    def _save_checkpoint(self, line: dict[str, Any], wait: bool) -> None:
        """Begin a checkpoint once the one before is over; with `wait`, return once it is durable and acknowledged."""

        def save() -> None:
            self._checkpoints.begin(
                self._version,
                self._streams.epoch,
                self._data_digest,
                self._pending.steps,
                replace_non_finite(line),
                self._worker.save,
                self._parts,
                self._require_latest,
            )
            if wait:
                self._settle_checkpoint(wait)

        self._settle_policy(wait=True)
        self._end_checkpoint(wait=True)
        # Processes that write together begin anew together.
        with self._hold():
            self._disk(save) if self._worker.world_size == 1 else save()

    def _require_latest(self) -> None:
        """Raise `FencedError` where a later trainer has taken over: its checkpoints must not be replaced."""
        with suppress(UnavailableError):
            self._streams.check_epoch()

    def _end_checkpoint(self, wait: bool) -> None:
        """As `_settle_checkpoint`; the steps of one that found no room stay pending, for the next one."""
        try:
            self._settle_checkpoint(wait)
        except DiskFullError as error:
            get_logger().warning("checkpoint_not_saved", reason=str(error))

    def _settle_checkpoint(self, wait: bool) -> None:
        """Acknowledge what the checkpoint that was begun last has consumed, once it is durable."""
        saved = self._checkpoints.settle(wait, self._validations.open_versions)
        if saved is None:
            return
        get_logger().info("checkpoint_saved", step=parse_step(saved), folder=str(saved))
        self._events.append(EventKind.CHECKPOINT, f"{saved.parent.name}/{saved.name}", parse_step(saved))
        self._acknowledge(parse_step(saved))
        self._kept_groups.prune(self._checkpoints.oldest_kept())
        if self._uploader is not None:
            self._uploader.add(saved)

    def _acknowledge(self, until: int) -> None:
        self._batcher.forget(self._pending.acknowledge(until), until)
        self._retry(self._streams.delete_orphans)

    def _on_silence(self) -> None:
        if self._announced < self._version:
            return  # the next policy is on its way: what holds it up is named by its own waits
        self._publisher.announce_again()
        if self._publisher.is_damaged() or self._refusals.is_to_be_published_again():
            # An engine that starts now could not load it, and without engines no later policy would take its place.
            get_logger().warning("policy_published_again", version=self._version)
            self._publish(whole=True)

    def _is_stream_full(self) -> bool:
        """Whether trained groups must leave the stream now: at its limit the rollout service pauses."""
        limit = self._retry(self._streams.read_byte_limit)
        return 0 < limit <= self._retry(lambda: self._streams.measure_bytes(self._streams.trajectories))

    def _poll(self) -> None:
        """Take note of what went on beside the training."""
        self._settle_policy(wait=False)
        self._validations.poll()
        self._end_checkpoint(wait=False)

    def _poll_in_wait(self) -> None:
        """`_poll`, and make room on a stream that got full before the batch was complete: nothing else would."""
        self._poll()
        self._refusals.check()
        if self._pending.steps and self._is_stream_full():
            self._settle_policy(wait=True)
            self._end_checkpoint(wait=True)
            if self._pending.steps:
                self._save_checkpoint(self._lines.last, wait=True)

    def _record_validation(self, result: dict[str, Any]) -> None:
        """Send a result to the trackers under the current step: some trackers refuse an earlier one."""
        self._tracker.log_validation(self._version, result)
        self._disk(lambda: self._checkpoints.mark_best(self._validations.scores()))

    def _probe(self, policy: Policy) -> None:
        """Probe the policy if the schedule says so."""
        if self._validation_probe is not None and (metrics := self._validation_probe.run(policy, self._stop.check)):
            self._disk(partial(self._metrics_file.amend, policy.version, metrics))
            self._tracker.log_probe(policy.version, metrics)

    def _check_guards(self, batch: Batch, metrics: dict[str, Any], clock: Stopwatch, began: float) -> None:
        """Check a step before its policy is published: no engine ever samples from a policy that a guard rejected.

        Raises:
            GuardStopError, RolledBackError: as the settings of the guard say.
        """
        step, trips = batch.number, self._guards.check(metrics, len(batch.groups))
        metrics["guards"] = [trip.guard for trip in trips]
        if trips:
            self._retry(self._streams.check_epoch)  # what a superseded trainer computes is not the run's
        for trip in trips:
            self._events.append(EventKind.GUARD, f"{trip.guard} ({trip.action}): {trip.reason}", step)
            get_logger().warning("guard_tripped", step=step, guard=trip.guard, action=trip.action, reason=trip.reason)
        if trips and trips[0].action != "warn":
            self._settle_policy(wait=True)
            self._end_checkpoint(wait=True)
            # The line stays for diagnosis until the next start, which takes the step again.
            line = self._lines.build(step, metrics, clock.seconds, time.perf_counter() - began)
            self._disk(partial(self._metrics_file.append, line))
            if trips[0].action == "stop":
                raise make_stop_error(step, trips[0])
            raise self._disk(partial(self._rollbacks.roll_back, step, trips[0], batch.reserved))

    def _resume(self, start: Start) -> None:
        """Restore weights, step and pending acknowledgements from the checkpoint, if there is one."""
        self._replay_until = start.acknowledged
        if start.checkpoint is None:
            self._disk(partial(self._metrics_file.rewind, 0))
            return
        state, manifest = start.checkpoint
        if manifest.data != self._data_digest:
            get_logger().warning("training_data_changed", since_step=manifest.step)
        self._worker.load(state)
        self._checkpoints.require_unchanged(state)
        manifest.restore_parts(self._parts)
        self._version = manifest.step
        self._disk(partial(self._metrics_file.rewind, manifest.step))
        self._disk(partial(self._metrics_file.append_missing, manifest.figures))
        self._pending.restore(manifest, self._retry(self._streams.read_ledger))
        get_logger().info("resumed", step=manifest.step, from_epoch=manifest.epoch, processes=manifest.world_size)

    def _publish(self, whole: bool = False) -> Policy:
        policy = self._publisher.publish(self._version, *self._snapshots.take(), whole)
        self._announced = self._version
        return policy

    def _begin_policy(self) -> Policy:
        """Publish on a thread beside the next step; returns what is known of the policy."""
        self._retry(self._streams.check_epoch)
        self._publisher.begin(self._version, *self._snapshots.take())
        return Policy(version=self._version, epoch=self._streams.epoch)

    def _settle_policy(self, wait: bool) -> None:
        """Issue what may be issued once the policy that was begun last is announced, and report its step."""
        if policy := self._publisher.settle(wait):
            self._announced = policy.version
            self._feeder.issue_up_to_bound(self._announced)
            self._lines.report(self._unreported | describe_policy(policy))
