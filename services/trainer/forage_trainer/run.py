"""The programs of the trainer's processes, however they were started: rank 0 leads, the others follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forage_queue.streams.client import StreamClient
from forage_queue.streams.durability import require_durability
from forage_queue.streams.history import open_history
from forage_queue.streams.payloads import Payloads
from forage_queue.trainer.batcher import BatchTimeoutError, StaleGroupsError
from forage_queue.trainer.decoder import GroupDecoder
from forage_queue.trainer.feeder import report_questions
from forage_queue.trainer.gpu_lease import GpuLease, GpuLeaseError
from forage_records.events import EventKind, EventLog
from forage_records.questions import Questions
from forage_runtime.errors import CollectiveTimeoutError, DiskFullError, FencedError, ForageError, RolledBackError
from forage_runtime.files.template_values import keep_template_date
from forage_runtime.problems import require_all
from forage_runtime.retries import CALL_TIMEOUT_S, Retries
from forage_runtime.security.audit import record_act
from forage_runtime.security.health_gate import HealthGate
from forage_runtime.settings import Settings
from forage_runtime.stop import Stop, Stopped
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.checkpoints.start import require_resumable
from forage_trainer.checks import list_checks
from forage_trainer.data.routes import EnvironmentCheck, check_rewards
from forage_trainer.data.splits import read_splits
from forage_weights.announcement import CANARY_ROWS

if TYPE_CHECKING:
    from forage_trainer.loop import TrainingLoop

_GIVEN_UP = (FencedError, BatchTimeoutError, CollectiveTimeoutError, StaleGroupsError, DiskFullError, GpuLeaseError)
EXIT_FAILED, EXIT_STOPPED = 1, 143


def run_leader(settings: Settings, stop: Stop) -> int:
    """Run rank 0, the only process that talks to Redis and publishes; returns its exit code.

    All input is checked before the engine is built, which takes minutes for a large model.

    Raises:
        UserError: the input or the machine is at fault, or a guard ended the run.
    """
    health = Health()
    settings = keep_template_date(settings)
    require_all(list_checks(settings))
    server = serve_health(settings.trainer.health_address, health, gate=HealthGate(settings.tls, "trainer"))
    try:
        health.wait_for("start", "reading the questions")
        train, validation, tokenizer = read_splits(settings)
        report_questions("train", train)
        report_questions("validation", validation)
        health.wait_for("start", "asking the reward service for its data sources")
        check_rewards(settings, {"data.train_files": train, "data.val_files": validation}, stop, health)
        scored = [] if settings.rollout.weights.canary == "off" else train.rows[:CANARY_ROWS]
        openings = tokenizer.encode_prompts([row.chat for row in scored])
        _train(settings, train, validation, tokenizer.pad_id, stop, health, openings)
    except Stopped:
        get_logger().info("stopped")
        return EXIT_STOPPED
    except RolledBackError as error:
        get_logger().error("rolled_back", reason=str(error))
        return error.exit_code
    except _GIVEN_UP as error:
        get_logger().error("trainer_gave_up", reason=str(error))
        return EXIT_FAILED
    finally:
        server.shutdown()
    return 0


def run_follower(settings: Settings, on_built: Callable[[], object] = lambda: None) -> None:
    """Run any other rank, until rank 0 ends.

    Args:
        on_built: called once the engine is built.

    Raises:
        CollectiveTimeoutError: another rank did not take part in time.
        RuntimeError: rank 0 died.
    """
    from forage_trainer.engine import spmd
    from forage_trainer.engine.policy_worker import PolicyWorker

    worker = PolicyWorker(settings)
    on_built()
    spmd.follow(worker)


def _train(
    settings: Settings,
    train: Questions,
    validation: Questions,
    pad_id: int,
    stop: Stop,
    health: Health,
    openings: Sequence[Sequence[int]] = (),
) -> None:
    from forage_trainer.engine.policy_worker import PolicyWorker
    from forage_trainer.loop import TrainingLoop

    retries = Retries(stop, health)
    retry = retries.redis
    decoder = GroupDecoder(retries.disk)
    history = open_history(settings.run, "trainer")
    streams = StreamClient(settings.redis, settings.run.id, CALL_TIMEOUT_S, history, Payloads(settings), decoder)
    retry(lambda: require_durability(streams, settings.redis))
    EnvironmentCheck(settings, streams, (train, validation), retry, stop)()
    retry(streams.require_payloads)
    trainer, lease = settings.trainer, None
    if trainer.placement == "colocated":
        lease = GpuLease(streams, retry, stop, trainer.batch_timeout_s)
    try:
        if lease is not None:
            require_resumable(settings, streams, retry, int(os.environ.get("WORLD_SIZE", "1")))
            health.wait_for("start", "waiting for engines to free the GPUs")
            retry(streams.acquire_epoch)  # only the latest trainer may put engines to sleep
            lease.acquire()
        health.wait_for("start", "building the engine")
        worker = PolicyWorker(settings)
        decoder.folder = worker.columns
        if decoder.folder is not None:
            decoder.folder.read_epoch = lambda: streams.epoch
        try:
            loop = TrainingLoop(settings, streams, worker, train, validation, pad_id, stop, health, lease, openings)
            with _record_end(settings, loop):
                loop.run()
        finally:
            worker.close()
    finally:
        if lease is not None:
            lease.close()


@contextmanager
def _record_end(settings: Settings, loop: TrainingLoop) -> Iterator[None]:
    """Write how the training ends into the run's events."""
    events = EventLog(settings.run.folder)
    try:
        yield
    except Stopped:
        events.append(EventKind.STOP, "the trainer was asked to stop", loop.step)
        raise
    except RolledBackError as error:
        events.append(EventKind.ROLLBACK, str(error), loop.step + 1)
        step, file = loop.step + 1, settings.security.audit_file
        record_act("roll_back_run", "trainer", file, run=settings.run.id, step=step, reason=str(error))
        raise
    except ForageError as error:
        events.append(EventKind.FAILURE, str(error), loop.step)
        raise
    events.append(EventKind.END, f"{loop.step} steps", loop.step)
