"""The trainer's loop: wait for a batch, step, publish, checkpoint, acknowledge, issue the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client import Counter

from forage_common.errors import UserError
from forage_common.files.questions import Questions
from forage_common.settings import AdvantageEstimator, GuardAction, Settings, ValidationMode
from forage_common.streams.client import StreamClient
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import LedgerEntry, Policy
from forage_trainer.checkpoints.checkpoint import Checkpoints, ConsumedGroup, ConsumedStep, Stateful
from forage_trainer.checkpoints.rollbacks import Rollbacks, stopped
from forage_trainer.checkpoints.upload import Uploader
from forage_trainer.data import spans
from forage_trainer.data.batcher import Batch, Batcher
from forage_trainer.data.dataset import batches
from forage_trainer.data.feeder import Feeder
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.reporting.guards import Guards
from forage_trainer.reporting.metrics import export, trajectory_figures
from forage_trainer.reporting.progress import MetricsFile, Phase, StateFile, finite
from forage_trainer.reporting.tracking import Tracker
from forage_trainer.reporting.trajectories import StepFiles
from forage_trainer.step import PolicyStep, Stopwatch
from forage_trainer.validation.validation import Validation
from forage_trainer.validation.validation_probe import ValidationProbe
from forage_trainer.waiting import Insist, Stop
from forage_trainer.weights.publisher import Publisher

_PHASES = ("wait", "logp", "ref", "values", "critic", "probe", "update", "publish", "checkpoint")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRIPS = Counter("forage_trainer_guard_trips_total", "Steps that set a guard off", ["guard", "action"])


class Loop:
    """One life of the trainer of a run."""

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
    ) -> None:
        folder = settings.run.folder
        trainer = settings.trainer
        self._settings = settings
        self._streams = streams
        self._worker = worker
        self._stop = stop
        self._insist = Insist(stop, health)
        self._data = train.digest
        self._total = trainer.total_training_steps
        self._state = StateFile(folder)
        self._metrics = MetricsFile(folder)
        checkpoints = folder / "checkpoints"
        self._checkpoints = Checkpoints(checkpoints, trainer.max_ckpt_to_keep, worker.parameters, worker.world_size)
        self._uploader = Uploader(checkpoints, trainer.upload_url, settings.run.id) if trainer.upload_url else None
        self._guards = Guards(trainer.guards)
        for name, guard in trainer.guards:
            if action := getattr(guard, "action", None):
                TRIPS.labels(name, action.value)  # shown from the start, as 0
        self._rollbacks = Rollbacks(folder, trainer.guards.max_rollbacks)
        self._batches = batches(train.rows, settings)
        self._feeder = Feeder(settings, streams, self._batches, self._insist)
        self._batcher = Batcher(streams, self._batches.batch_size, trainer, self._feeder, self._insist, stop, health)
        with_critic = trainer.algorithm.adv_estimator is AdvantageEstimator.GAE
        self._step = PolicyStep(settings, worker, pad_id, worker if with_critic else None)
        self._files = StepFiles(settings)
        self._tracker = Tracker(settings)
        self._validation = Validation(settings, streams, validation.rows, self._state, self._insist, stop, health)
        self._validation_probe = ValidationProbe(settings, validation.rows, self._state) if trainer.probe.freq else None
        self._health = health
        self._version = 0
        self._pending: list[tuple[ConsumedStep, list[bytes]]] = []
        self._parts: dict[str, Stateful] = {
            "guards": self._guards,
            "kl": self._step.kl,
            "validation": self._validation,
        }

    def run(self) -> None:
        """Train to `trainer.total_training_steps`.

        Raises:
            Stopped: asked to stop before the end; the next start resumes.
            FencedError: a newer trainer has taken over this run.
            UserError: no disk space, or Redis holds another history of this run.
            BatchTimeoutError: the rollout service gave no trajectories.
            GuardStopError: a guard ended the run.
            RolledBackError: a guard sent the run back; the next start resumes.
        """
        done = False
        try:
            self._train()
            done = True
        finally:
            self._tracker.close(done)
            if self._uploader is not None:
                self._uploader.close(self._settings.trainer.upload_wait_s if done else 0.0)

    def _train(self) -> None:
        self._state.set(Phase.STARTING, "taking over the run")
        self._checkpoints.require_space()
        self._insist(self._streams.create_groups)
        self._resume()
        epoch = self._insist(self._streams.acquire_epoch)
        folder = self._settings.run.folder
        model, shard_bytes = self._settings.model.path, self._settings.trainer.publish.shard_bytes
        self._publisher = Publisher(folder / "policies", model, self._streams, epoch, shard_bytes, self._insist)
        policy = self._publish()
        self._acknowledge()
        held = self._batcher.start(self._version)
        get_logger().info("trainer_started", step=self._version, total=self._total, epoch=epoch, groups_held=held)
        self._health.mark_started()
        if self._settings.trainer.val_before_train and self._version == 0:
            self._validate("before", policy, meanwhile=lambda: self._feeder.issue_up_to_bound(0))
        self._checkpoints.keep_best(self._validation.scores())
        self._validation.resume()
        # An earlier life may have ended before it came to them.
        self._validate_step(policy)
        self._probe(policy)
        while self._version < self._total:
            policy = self._take_step(policy)
            self._validated(self._validation.poll())
            self._validate_step(policy)
            self._probe(policy)
        self._validated(self._validation.finish())
        self._validate("after", policy)
        self._state.set(Phase.DONE, f"{self._total} steps", self._total, self._total)
        get_logger().info("trainer_done", step=self._version)

    def _take_step(self, policy: Policy) -> Policy:
        step = self._version + 1
        began, began_ns = time.perf_counter(), time.time_ns()
        clock = Stopwatch()
        self._state.set(Phase.TRAINING, f"step {step}", self._version, self._total)
        self._feeder.issue_up_to_bound(self._version)
        with clock("wait", traced=False):
            batch = self._batcher.next(step, self._settings.trainer.batch_timeout_s)
        with spans.step(step, batch.groups, began_ns):
            return self._train_on(batch, policy, clock, began)

    def _train_on(self, batch: Batch, policy: Policy, clock: Stopwatch, began: float) -> Policy:
        step = batch.number
        if self._rollbacks.skips(step):
            get_logger().warning("step_skipped", step=step, reason="a guard had sent the run back because of it")
            figures = trajectory_figures(batch.groups, policy.version)
            figures |= batch.figures | {"dead_groups": 0, "guards": ["skipped"]}
        else:
            keep = partial(self._files.write, step) if self._files.keeps(step) else None
            with self._batcher.ahead():
                figures = self._step(batch, policy, clock, self._stop.check, keep)
            self._guard(step, figures, len(batch.groups), clock, began)
        self._version = step
        self._remember(batch, policy.epoch)
        with clock("publish"):
            policy = self._publish()
        figures["publish_bytes"] = sum(file.bytes for file in policy.files)
        line = self._line(step, figures, clock, time.perf_counter() - began)
        if step % self._settings.trainer.save_freq == 0 or step == self._total or self._is_validated(step):
            with clock("checkpoint"):
                saved = self._save(policy.epoch, line)
                self._acknowledge()
            if self._uploader is not None:
                self._uploader.add(saved)
            line = self._line(step, figures, clock, time.perf_counter() - began)
        self._report(line)
        return policy

    def _is_validated(self, step: int) -> bool:
        """Whether a validation follows this step; a checkpoint is saved before it, for it may be the best."""
        frequency = self._settings.trainer.test_freq
        return frequency > 0 and step % frequency == 0 and 0 < step < self._total

    def _validate_step(self, policy: Policy) -> None:
        """Begin the validation that follows this step, if one does, and wait for it if training is to pause."""
        if not self._is_validated(self._version):
            return
        self._validated(self._validation.finish())
        label = f"step-{self._version}"
        if self._settings.trainer.validation_mode is ValidationMode.OVERLAPPED:
            self._validation.begin(label, policy)
        else:
            self._validate(label, policy)

    def _validate(self, label: str, policy: Policy, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._validated(self._validation.run(label, policy, meanwhile))

    def _validated(self, result: dict[str, Any] | None) -> None:
        """A result goes to the trackers under the step at which it is known, for some take no step twice or late."""
        if result is not None:
            self._tracker.validated(self._version, result)
            self._checkpoints.keep_best(self._validation.scores())

    def _probe(self, policy: Policy) -> None:
        """Probe the policy where it is its turn."""
        if self._validation_probe is not None and (figures := self._validation_probe.run(policy, self._stop.check)):
            self._metrics.amend(policy.version, figures)
            self._tracker.probed(policy.version, figures)

    def _guard(self, step: int, figures: dict[str, Any], groups: int, clock: Stopwatch, began: float) -> None:
        """Judge a step before its policy is published.

        Raises:
            GuardStopError, RolledBackError: as the settings of the guard say.
        """
        trips = self._guards.check(figures, groups)
        figures["guards"] = [trip.guard for trip in trips]
        for trip in trips:
            TRIPS.labels(trip.guard, trip.action.value).inc()
            get_logger().warning(
                "guard_tripped", step=step, guard=trip.guard, action=trip.action.value, reason=trip.reason
            )
        if trips and trips[0].action is not GuardAction.WARN:
            # The line stays until the next start, which takes the step again.
            self._metrics.append(self._line(step, figures, clock, time.perf_counter() - began))
            if trips[0].action is GuardAction.STOP:
                raise stopped(step, trips[0])
            raise self._rollbacks.roll_back(step, trips[0])

    def _resume(self) -> None:
        """Weights, step and unacknowledged groups of the newest checkpoint, if there is one."""
        found = self._checkpoints.newest()
        run = self._settings.run
        if found is not None and not self._settings.trainer.resume:
            raise UserError(
                f"{run.folder} holds a checkpoint of step {found[1].step}, and trainer.resume is false: "
                "give another run.id, or set trainer.resume=true to go on"
            )
        ledger = self._insist(self._streams.read_ledger)
        known = found[1].step if found is not None else 0
        if max(ledger, default=0) > known:
            raise UserError(
                f"run '{run.id}' was acknowledged up to step {max(ledger)} in Redis, but {run.folder} holds "
                f"{f'a checkpoint of step {known}' if known else 'no checkpoint'}: give another run.id"
            )
        if found is None:
            self._metrics.rewind(0)
            return
        state, manifest = found
        manifest.require_world_size(self._worker.world_size)
        if manifest.data != self._data:
            get_logger().warning("training_data_changed", since_step=manifest.step)
        self._worker.load(state)
        manifest.restore(self._parts)
        self._version = manifest.step
        self._metrics.rewind(manifest.step)
        self._metrics.ensure(manifest.figures)
        self._pending = [
            (step, [group.entry.encode() for group in step.groups])
            for step in manifest.consumed
            if step.step not in ledger
        ]
        get_logger().info("resumed", step=manifest.step, from_epoch=manifest.epoch)

    def _publish(self) -> Policy:
        name = self._settings.trainer.publish.dtype
        dtype = _DTYPES.get(self._settings.rollout.engine.dtype if name == "auto" else name, torch.float32)
        # An engine that was started for adapters takes nothing else.
        alone = self._settings.rollout.engine.max_lora_rank > 0
        return self._publisher.publish(
            self._version, self._worker.adapter(dtype) if alone else self._worker.weights(dtype)
        )

    def _remember(self, batch: Batch, epoch: int) -> None:
        groups = tuple(
            ConsumedGroup(g.batch, g.position, g.attempt, g.group_uid, entry.id.decode())
            for entry in batch.entries
            for g in [entry.message]
        )
        dropped = tuple(self._batches.group(batch.number, position)[0] for position in batch.stragglers)
        self._pending.append((ConsumedStep(batch.number, epoch, groups, dropped), batch.ids))
        self._batcher.done(batch.number)

    def _save(self, epoch: int, line: dict[str, Any]) -> Path:
        consumed = tuple(step for step, _ in self._pending)
        folder = self._checkpoints.save(
            self._version,
            epoch,
            self._data,
            consumed,
            finite(line),
            lambda path: self._worker.save(path, self._version),
            self._parts,
            awaited=self._validation.open_versions,
        )
        get_logger().info("checkpoint_saved", step=self._version, folder=str(folder))
        return folder

    def _acknowledge(self) -> None:
        """Ledger entries for all steps that a durable checkpoint holds."""
        for step, ids in self._pending:
            entry = LedgerEntry(
                step=step.step,
                group_uids=[group.uid for group in step.groups],
                epoch=step.epoch,
                acknowledged_unix_ms=int(time.time() * 1000),
                dropped_group_uids=step.dropped,
            )
            self._insist(partial(self._streams.acknowledge, entry, ids))
        self._pending = []

    def _line(self, step: int, figures: dict[str, Any], clock: Stopwatch, seconds: float) -> dict[str, Any]:
        """The step's line of the metrics file."""
        split = {name: round(clock.seconds.get(name, 0.0), 4) for name in _PHASES} | {"total": round(seconds, 4)}
        rate = {"seconds": split, "tokens_per_s": figures["tokens"] / seconds, "time": time.time()}
        return {"step": step, "total_steps": self._total} | figures | rate

    def _report(self, line: dict[str, Any]) -> None:
        self._metrics.append(line)
        export(line)
        self._tracker.log(line["step"], line)
        shown = ("step", "total_steps", "reward_mean", "em_mean", "search_rate", "grad_norm", "logprob_diff_mean")
        get_logger().info("step_done", **{name: line.get(name) for name in shown}, seconds=line["seconds"]["total"])
