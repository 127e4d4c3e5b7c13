"""Checkpoints as the loop makes them: begun after a step, durable beside the next, then their groups acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from forage_queue.streams.client import StreamClient
from forage_queue.trainer.batcher import Batch, UnackedSteps
from forage_queue.trainer.replay_groups import ReplayGroups
from forage_records.events import EventKind, EventLog
from forage_runtime.errors import DiskFullError, UnavailableError
from forage_runtime.retries import Retries
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.manifest import Manifest, Stateful, parse_step
from forage_trainer.checkpoints.start import Start, await_space, take_over
from forage_trainer.checkpoints.upload import Uploader
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.reporting.progress import replace_non_finite

UPLOAD_WAIT_S = 600.0
"""Longest wait of a run that is done for its uploads: enough for the two checkpoints of a large model that may wait,
and not for ever at a store that is down. What is missing is copied at the next start."""


class Inbox(Protocol):
    """Where groups come from."""

    def forget(self, ids: Iterable[bytes], acknowledged: int) -> None:
        """Note that these entries have left the stream, and that every step up to `acknowledged` is acknowledged."""


class CheckpointWriter:
    """The checkpoints of a run, and the groups whose effect they hold.

    A step's groups are acknowledged once a durable checkpoint holds their effect: see `UnackedSteps`.

    Args:
        data_digest: of the training questions.
        hold: entered while the worker writes its state: it may share its GPUs.
        list_unscored: returns the steps whose validation is under way; their checkpoints stay.

    Attributes:
        parts: what else has a state, by name; the loop adds them.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        worker: PolicyWorker,
        data_digest: str,
        retries: Retries,
        hold: Callable[[], AbstractContextManager[Any]],
        signatures: RunSignatures,
        events: EventLog,
        list_unscored: Callable[[], Collection[int]],
    ) -> None:
        self._settings, self._streams, self._worker, self._data_digest = settings, streams, worker, data_digest
        self._retries, self._hold, self._events, self._list_unscored = retries, hold, events, list_unscored
        folder, trainer = settings.run.folder / "checkpoints", settings.trainer
        kept = trainer.max_ckpt_to_keep
        self._checkpoints = Checkpoints(folder, kept, worker.parameters, worker.world_size, signatures=signatures)
        self._uploader = Uploader(folder, trainer.upload_url, settings.run.id) if trainer.upload_url else None
        self._pending = UnackedSteps(streams, retries.redis)
        self._replay_groups = ReplayGroups(folder / "groups")
        self._keeps_groups = kept > 1
        self.parts: dict[str, Stateful] = {}

    def await_space(self, has_begun: bool) -> None:
        """See `start.await_space`."""
        await_space(self._checkpoints, has_begun, self._retries.disk)

    def take_over(self, floor: int) -> Start:
        """Find where to begin, and acquire an epoch above `floor` and those of all checkpoints.

        Raises:
            UserError: as `start.take_over`.
        """
        floor = max(floor, self._checkpoints.highest_epoch())
        retry = self._retries.redis
        return take_over(self._settings, self._checkpoints, self._replay_groups, self._streams, retry, floor)

    def restore(self, start: Start) -> Manifest | None:
        """Restore the worker, the parts and the pending steps; returns the checkpoint's manifest, None without one.

        Raises:
            UserError: a file of it was changed while it was loaded.
        """
        if start.checkpoint is None:
            return None
        state, manifest = start.checkpoint
        if manifest.data != self._data_digest:
            get_logger().warning("training_data_changed", since_step=manifest.step)
        self._worker.load(state)
        self._checkpoints.require_unchanged(state)
        manifest.restore_parts(self.parts)
        self._pending.restore(manifest.consumed, self._retries.redis(self._streams.read_ledger))
        get_logger().info("resumed", step=manifest.step, from_epoch=manifest.epoch, processes=manifest.world_size)
        return manifest

    def read_groups(self, step: int) -> Batch:
        """Read the groups of a step that was acknowledged and is taken again; raises as `ReplayGroups.read`."""
        return self._replay_groups.read(step)

    @property
    def has_pending(self) -> bool:
        """Whether groups of steps are not acknowledged yet."""
        return bool(self._pending.steps)

    def add_step(self, batch: Batch, epoch: int, dropped: tuple[str, ...]) -> None:
        """Let the next checkpoint hold a step; see `UnackedSteps.add`."""
        self._pending.add(batch, epoch, dropped)

    def keep_groups(self, batch: Batch) -> None:
        """Keep a step's groups for as long as its checkpoint may turn out to be damaged."""
        if self._keeps_groups:
            self._retries.disk(partial(self._replay_groups.write, batch))

    def begin(self, step: int, figures: Mapping[str, Any], inbox: Inbox, wait: bool) -> None:
        """Begin a checkpoint once the one before is over.

        Args:
            figures: the step's line.
            wait: return once it is durable, and its groups are acknowledged.
        """

        def save() -> None:
            self._checkpoints.begin(
                step,
                self._streams.epoch,
                self._data_digest,
                self._pending.steps,
                replace_non_finite(dict(figures)),
                self._worker.save,
                self.parts,
                self._require_latest,
            )
            if wait:
                self._finish(inbox, self._checkpoints.wait)

        self.wait(inbox)
        # Processes that write together begin anew together.
        with self._hold():
            self._retries.disk(save) if self._worker.world_size == 1 else save()

    def poll(self, inbox: Inbox) -> None:
        """Acknowledge the groups of the checkpoint that was begun last, if it is durable.

        The steps of one that found no room stay pending, for the next one.
        """
        with self._warn_of_full_disk():
            self._finish(inbox, self._checkpoints.poll)

    def wait(self, inbox: Inbox) -> None:
        """As `poll`, once the checkpoint is durable, if one was begun."""
        with self._warn_of_full_disk():
            self._finish(inbox, self._checkpoints.wait)

    @contextmanager
    def _warn_of_full_disk(self) -> Iterator[None]:
        try:
            yield
        except DiskFullError as error:
            get_logger().warning("checkpoint_not_saved", reason=str(error))

    def _finish(self, inbox: Inbox, get_saved: Callable[[Collection[int]], Path | None]) -> None:
        saved = get_saved(self._list_unscored())
        if saved is None:
            return
        step = parse_step(saved)
        get_logger().info("checkpoint_saved", step=step, folder=str(saved))
        self._events.append(EventKind.CHECKPOINT, f"{saved.parent.name}/{saved.name}", step)
        self.acknowledge(inbox, step)
        self._replay_groups.prune(self._checkpoints.oldest_kept())
        if self._uploader is not None:
            self._uploader.add(saved)

    def acknowledge(self, inbox: Inbox, until: int) -> None:
        """Acknowledge the pending steps up to one that a durable checkpoint holds."""
        inbox.forget(self._pending.acknowledge(until), until)
        self._retries.redis(self._streams.delete_orphans)

    def mark_best(self, scores: Mapping[int, float]) -> None:
        """See `Checkpoints.mark_best`."""
        self._retries.disk(partial(self._checkpoints.mark_best, scores))

    def close(self, is_done: bool) -> None:
        """Wait for a checkpoint that was begun; after the last step for uploads, too, for a while."""
        self._checkpoints.close()
        if self._uploader is not None:
            self._uploader.close(UPLOAD_WAIT_S if is_done else 0.0)

    def _require_latest(self) -> None:
        """Raise `FencedError` where a later trainer has taken over: its checkpoints must not be replaced."""
        with suppress(UnavailableError):
            self._streams.check_epoch()
