"""Where a process of the trainer begins: at the newest checkpoint that the run can go on from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from forage_queue.streams.client import StreamClient
from forage_queue.trainer.replay_groups import ReplayGroups
from forage_queue.trainer.slots import SLOTS, ConsumedSlots, SlotsOfSteps, slot_of
from forage_runtime.errors import DiskFullError, UserError
from forage_runtime.retries import DiskRetry, RedisRetry
from forage_runtime.security.audit import record_act
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.manifest import Manifest
from forage_trainer.reporting.settings_file import write_settings


@dataclass(frozen=True)
class Start:
    """Where a process begins.

    checkpoint: (state folder, manifest); None at step 0. acknowledged: the last step in the ledger, which is later than
    the checkpoint if a newer checkpoint was damaged. replayed: with trainer.batching=ready what each step between the
    two has settled.
    """

    checkpoint: tuple[Path, Manifest] | None
    acknowledged: int
    replayed: SlotsOfSteps = field(default_factory=dict)


def await_space(checkpoints: Checkpoints, has_begun: bool, disk: DiskRetry) -> None:
    """Return once the disk has room for a checkpoint.

    Raises:
        UserError: it has none, and the run has not begun.
    """
    try:
        checkpoints.require_space()
    except DiskFullError as error:
        if checkpoints.is_empty and not has_begun:
            raise UserError(str(error)) from None
        disk(checkpoints.require_space)


def require_resumable(settings: Settings, streams: StreamClient, retry: RedisRetry, world_size: int) -> None:
    """Check that `take_over` will find where to begin, before anything of the run is changed or a GPU is taken.

    Files of checkpoints are not read, which takes minutes: `take_over` reads them.

    Raises:
        UserError: as `find_start`.
    """
    folder, keep = settings.run.folder / "checkpoints", settings.trainer.max_ckpt_to_keep
    signatures = RunSignatures(settings.security, settings.run.id)
    checkpoints = Checkpoints(folder, keep, 0, world_size, signatures=signatures)
    acknowledged = max(retry(streams.read_ledger), default=0)
    find_start(settings, checkpoints, ReplayGroups(folder / "groups"), acknowledged, verify=False)


def take_over(
    settings: Settings,
    checkpoints: Checkpoints,
    replay_groups: ReplayGroups,
    streams: StreamClient,
    retry: RedisRetry,
    floor: int,
) -> Start:
    """Find where to begin, then acquire an epoch: from then on Redis refuses an older trainer that is still alive.

    Only then is anything of the run replaced, in its folder or in Redis: a start that is refused changes nothing.

    Args:
        floor: as of `StreamClient.acquire_epoch`.

    Raises:
        UserError: as `find_start`. What cannot be resumed must not fence off a trainer that runs.
    """

    def look() -> tuple[int, list[int]]:
        """The last step of the ledger, and the checkpoints, of which the newest may not be in the ledger yet."""
        return max(retry(streams.read_ledger), default=0), checkpoints.list_steps()

    seen = look()
    start = find_start(settings, checkpoints, replay_groups, seen[0])
    retry(lambda: streams.acquire_epoch(floor))
    if (now := look()) != seen:  # the other one has gone on meanwhile
        start = find_start(settings, checkpoints, replay_groups, now[0])
    _record(settings, start, streams.epoch)
    write_settings(settings)
    retry(streams.offer_payloads)
    if settings.trainer.batching == "ready":
        saved_step = start.checkpoint[1].step if start.checkpoint else 0
        again = range(saved_step + 1, start.acknowledged + 1)
        return replace(start, replayed=list_settled(replay_groups, streams, retry, again))
    return start


def list_settled(replay_groups: ReplayGroups, streams: StreamClient, retry: RedisRetry, steps: range) -> SlotsOfSteps:
    """List the slots that acknowledged steps have settled: of groups that were trained on, and of dropped ones."""
    settled = {step: [slot_of(group) for group in replay_groups.read(step).groups] for step in steps}
    ledger = retry(streams.read_ledger) if steps else {}
    dropped = {uid: step for step in steps if step in ledger for uid in ledger[step].dropped_group_uids}
    for issue in retry(streams.read_issued) if dropped else ():
        if step := dropped.get(issue.group_uid):
            settled[step].append((issue.batch, issue.position))
    return settled


def _record(settings: Settings, start: Start, epoch: int) -> None:
    file, which = settings.security.audit_file, {"run": settings.run.id, "epoch": epoch}
    if start.checkpoint is None:
        record_act("start_run", "trainer", file, **which)
    else:
        state, manifest = start.checkpoint
        record_act("restore_checkpoint", "trainer", file, **which, step=manifest.step, folder=str(state.parent))


def find_start(
    settings: Settings, checkpoints: Checkpoints, replay_groups: ReplayGroups, acknowledged: int, verify: bool = True
) -> Start:
    """Find the newest checkpoint that the run can go on from.

    Args:
        acknowledged: the last step in the ledger.
        verify: as of `read_checkpoint`.

    Raises:
        UserError: there is none, and Redis or the folder says that the run has begun; or it is one of
            trainer.batching=ready, and this run is strict; or so many processes cannot read it.
    """
    checkpoint, run = checkpoints.find_newest(verify), settings.run
    if checkpoint is not None and not settings.trainer.resume:
        raise UserError(
            f"{run.folder} holds a checkpoint of step {checkpoint[1].step}, and trainer.resume is false: "
            "give another run.id, or set trainer.resume=true to resume"
        )
    saved_step = checkpoint[1].step if checkpoint is not None else 0
    if checkpoint is not None:
        match_order(settings, checkpoint[1])
    # Acknowledged groups are gone from the stream. The files have those since the checkpoint before the newest.
    again = range(saved_step + 1, acknowledged + 1)
    if not replay_groups.has(again):
        raise UserError(
            f"run '{run.id}' was acknowledged up to step {acknowledged} in Redis, but {run.folder} holds "
            f"{f'a checkpoint of step {saved_step}' if saved_step else 'no checkpoint'}: give another run.id"
        )
    if again:
        get_logger().warning("steps_taken_again", first=again[0], last=again[-1], checkpoint=saved_step)
    return Start(checkpoint, acknowledged)


def match_order(settings: Settings, manifest: Manifest) -> None:
    """See to it that the next step takes groups that no step has taken, whatever trainer.batching was before.

    Raises:
        UserError: it was ready, and is strict: a strict step would take groups of its batch again.
    """
    state = manifest.parts.get(SLOTS)
    if settings.trainer.batching == "strict":
        if state is not None:
            raise UserError(
                f"run '{settings.run.id}' was trained with trainer.batching=ready up to step {manifest.step}, and its "
                "steps took groups of several batches: set trainer.batching=ready to go on, or give another run.id"
            )
        return
    if state is None:
        settled = ConsumedSlots(settings.data.train_batch_size)
        settled.restart(manifest.step)
        state = settled.state_dict()
    # While steps are taken again, a checkpoint knows of those that were acknowledged and come after it.
    slots = [slot for slot in state["places"] if slot[2] <= manifest.step]
    manifest.parts[SLOTS] = state | {"places": slots}
