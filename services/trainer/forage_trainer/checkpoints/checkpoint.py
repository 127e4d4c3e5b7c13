"""Checkpoints: complete or absent, newest first, and with what the trainer must remember besides weights.

Layout of `<run folder>/checkpoints/`: `step_<n>/manifest.json`, `step_<n>/state/` (verl's files), and `latest` and
`best`, the names of the newest one and of the one that validated best.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forage_common.errors import DataError, UserError
from forage_common.telemetry.logs import get_logger
from forage_trainer.files import digest, folder_bytes, new_folder, remove, remove_leftovers, write_json, write_text

BYTES_PER_PARAMETER = 16
"""Weights and two Adam moments in fp32, and room for what is written beside them."""

LISTING_S = 90.0
"""For files of other nodes to be seen: NFS clients remember a folder's listing for up to a minute."""


LATEST, BEST, MANIFEST, STATE = "latest", "best", "manifest.json", "state"


class Stateful(Protocol):
    """A part of the trainer that must go on where it was. Its state is plain JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class ConsumedGroup:
    """A group that a step ate. entry: its id on the trajectories stream."""

    batch: int
    position: int
    attempt: int
    uid: str
    entry: str


@dataclass(frozen=True)
class ConsumedStep:
    """A step whose groups are to be acknowledged once the checkpoint that holds it is durable.

    dropped: uids of groups that were issued for it and did not come in time, as their places had them first.
    """

    step: int
    epoch: int
    groups: tuple[ConsumedGroup, ...]
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """step: optimizer steps taken; the data cursor, since batch n feeds step n.

    epoch: of the trainer that wrote it; consumed: steps since the checkpoint before; data: digest of the training
    files; figures: the step's line of the metrics file; files: SHA-256 by name below `state/`; world_size: processes
    that wrote `state/`; parts: `Stateful.state_dict` by name.
    """

    step: int
    epoch: int
    data: str
    consumed: tuple[ConsumedStep, ...]
    figures: dict[str, Any]
    files: dict[str, str]
    world_size: int = 1
    parts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        tree = json.loads(path.read_text())
        steps = [
            ConsumedStep(
                s["step"], s["epoch"], tuple(ConsumedGroup(**g) for g in s["groups"]), tuple(s.get("dropped", ()))
            )
            for s in tree["consumed"]
        ]
        return cls(**(tree | {"consumed": tuple(steps)}))

    def require_world_size(self, found: int) -> None:
        """
        Raises:
            UserError: the checkpoint was written by another number of processes.
        """
        if found != self.world_size:
            raise UserError(
                f"the checkpoint of step {self.step} was written by {self.world_size} trainer processes, and {found} "
                f"cannot read their shards: start {self.world_size}, or begin another run.id with model.path set to "
                "what `forage trainer export` makes of it"
            )

    def restore(self, parts: Mapping[str, Stateful]) -> None:
        """Give every part its state back; a part that the checkpoint does not know begins anew, with a warning."""
        for name, part in parts.items():
            if name in self.parts:
                part.load_state_dict(self.parts[name])
            else:
                get_logger().warning("state_not_in_checkpoint", part=name, step=self.step)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        parameters: int,
        world_size: int = 1,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        listing_s: float = LISTING_S,
    ) -> None:
        """
        Args:
            keep: newest checkpoints that stay.
            parameters: of the model, for the size of a first checkpoint.
            world_size: processes that train.
            free_bytes: of the disk that holds a folder.
            listing_s: wait for the files of all processes to be seen.
        """
        self._folder = folder
        self._keep = keep
        self._parameters = parameters
        self._world_size = world_size
        self._free_bytes = free_bytes
        self._listing_s = listing_s
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def require_space(self) -> None:
        """
        Raises:
            UserError: the disk has no room for another checkpoint; names folder, needed and free bytes.
        """
        last = self._steps()[:1]
        needed = folder_bytes(self._path(last[0])) if last else BYTES_PER_PARAMETER * self._parameters
        free = self._free_bytes(self._folder)
        if free < needed:
            raise _no_space(self._folder, needed, free)

    def save(
        self,
        step: int,
        epoch: int,
        data: str,
        consumed: tuple[ConsumedStep, ...],
        figures: dict[str, Any],
        write: Callable[[Path], None],
        parts: Mapping[str, Stateful] | None = None,
        awaited: Collection[int] = (),
    ) -> Path:
        """Write a checkpoint; it is durable when this returns, and nothing of it is there when this raises.

        Args:
            write: fills a folder with the engine's state.
            parts: what else must go on where it was, by name.
            awaited: steps whose score is not known yet: they stay.

        Raises:
            UserError: no disk space, or the files of some process do not appear.
        """
        self.require_space()
        target = self._path(step)
        try:
            with new_folder(target) as folder:
                state = folder / STATE
                state.mkdir()
                write(state)
                self._await_shards(state)
                files = {str(f.relative_to(state)): digest(f) for f in sorted(state.rglob("*")) if f.is_file()}
                states = {name: part.state_dict() for name, part in (parts or {}).items()}
                manifest = Manifest(step, epoch, data, consumed, figures, files, self._world_size, states)
                write_json(folder / MANIFEST, asdict(manifest))
            write_text(self._folder / LATEST, target.name + "\n")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _no_space(self._folder, None, self._free_bytes(self._folder)) from None
        kept = {self.best(), *awaited, *self._steps()[: self._keep]}
        for old in self._steps():
            if old not in kept:
                remove(self._path(old))
        return target

    def _await_shards(self, state: Path) -> None:
        """Wait until what the first process wrote is there from every other one, too."""
        own = [path for path in state.rglob("*") if path.name.endswith("_rank_0.pt")]
        wanted = [path.with_name(path.name[:-4] + f"{r}.pt") for path in own for r in range(1, self._world_size)]
        deadline = time.monotonic() + self._listing_s
        while missing := set(wanted) - set(state.rglob("*.pt")):
            if time.monotonic() > deadline:
                names = ", ".join(sorted(str(path.relative_to(state)) for path in missing)[:4])
                raise UserError(
                    f"{len(missing)} of {len(own) * self._world_size} files of a checkpoint do not appear in {state} "
                    f"({names}): run.dir must be on a volume that all nodes of the trainer share"
                )
            time.sleep(0.5)

    def best(self) -> int | None:
        """The step that `best` names, if its checkpoint is there."""
        try:
            step = int((self._folder / BEST).read_text().strip().removeprefix("step_"))
        except (OSError, ValueError):
            return None
        return step if self._path(step).is_dir() else None

    def keep_best(self, scores: Mapping[int, float]) -> int | None:
        """Name the best of the checkpoints that are there, the first one of equals; it stays until one is better.

        Args:
            scores: step → validation score, the higher the better.
        """
        there = [step for step in sorted(self._steps()) if step in scores]
        best = max(there, key=scores.__getitem__, default=None)
        if best is not None and best != self.best():
            write_text(self._folder / BEST, self._path(best).name + "\n")
            get_logger().info("best_checkpoint", step=best, score=scores[best])
        return best

    def newest(self) -> tuple[Path, Manifest] | None:
        """(state folder, manifest) of the newest checkpoint whose files are what was written, if there is any.

        `latest` is for people; a checkpoint renamed into place counts even if the process died before naming it.
        """
        for step in self._steps():
            try:
                return self._path(step) / STATE, read_checkpoint(self._path(step))
            except DataError as error:
                get_logger().warning("checkpoint_passed_over", reason=str(error))
        return None

    def _steps(self) -> list[int]:
        return sorted((step_of(path) for path in checkpoints_in(self._folder)), reverse=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step}"


def checkpoints_in(folder: Path) -> list[Path]:
    """All checkpoints of a folder, the oldest first."""
    return sorted((path for path in folder.glob("step_*") if path.name[5:].isdigit()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))


def read_checkpoint(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are what was written.

    Raises:
        DataError: the folder is no checkpoint, or a file is missing or altered.
    """
    try:
        manifest = Manifest.read(folder / MANIFEST)
        wrong = [name for name, value in manifest.files.items() if digest(folder / STATE / name) != value]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is no whole checkpoint ({error!r}): take another") from None
    if wrong:
        raise DataError(f"the checkpoint {folder} is damaged ({', '.join(wrong)} changed since): take another")
    return manifest


def _no_space(folder: Path, needed: int | None, free: int) -> UserError:
    wanted = "" if needed is None else f" needs {needed} bytes and"
    return UserError(
        f"no disk space for a checkpoint: {folder}{wanted} has {free} bytes free: "
        "free some, or set run.dir to another disk"
    )
