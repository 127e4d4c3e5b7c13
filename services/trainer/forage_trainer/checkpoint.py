"""Checkpoints: complete or absent, newest first, and with what the trainer must remember besides weights.

Layout of `<run folder>/checkpoints/`: `step_<n>/manifest.json`, `step_<n>/state/` (verl's files), and `latest`, the
name of the newest one.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forage_common.errors import UserError
from forage_common.telemetry import get_logger
from forage_trainer.files import digest, folder_bytes, new_folder, remove_leftovers, write_json, write_text

BYTES_PER_PARAMETER = 16
"""Weights and two Adam moments in fp32, and room for what is written beside them."""


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
    """A step whose groups are to be acknowledged once the checkpoint that holds it is durable."""

    step: int
    epoch: int
    groups: tuple[ConsumedGroup, ...]


@dataclass(frozen=True)
class Manifest:
    """step: optimizer steps taken; the data cursor, since batch n feeds step n.

    epoch: of the trainer that wrote it; consumed: steps since the checkpoint before; data: digest of the training
    files; figures: the step's line of the metrics file; files: SHA-256 by name below `state/`.
    """

    step: int
    epoch: int
    data: str
    consumed: tuple[ConsumedStep, ...]
    figures: dict[str, Any]
    files: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        tree = json.loads(path.read_text())
        steps = [
            ConsumedStep(s["step"], s["epoch"], tuple(ConsumedGroup(**g) for g in s["groups"]))
            for s in tree["consumed"]
        ]
        return cls(tree["step"], tree["epoch"], tree["data"], tuple(steps), tree["figures"], tree["files"])


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        parameters: int,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        """
        Args:
            keep: newest checkpoints that stay.
            parameters: of the model, for the size of a first checkpoint.
            free_bytes: of the disk that holds a folder.
        """
        self._folder = folder
        self._keep = keep
        self._parameters = parameters
        self._free_bytes = free_bytes
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
    ) -> Path:
        """Write a checkpoint; it is durable when this returns, and nothing of it is there when this raises.

        Args:
            write: fills a folder with the engine's state.

        Raises:
            UserError: no disk space.
        """
        self.require_space()
        target = self._path(step)
        try:
            with new_folder(target) as folder:
                state = folder / "state"
                state.mkdir()
                write(state)
                files = {str(f.relative_to(state)): digest(f) for f in sorted(state.rglob("*")) if f.is_file()}
                write_json(folder / "manifest.json", asdict(Manifest(step, epoch, data, consumed, figures, files)))
            write_text(self._folder / "latest", target.name + "\n")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _no_space(self._folder, None, self._free_bytes(self._folder)) from None
        for old in self._steps()[self._keep :]:
            shutil.rmtree(self._path(old))
        return target

    def newest(self) -> tuple[Path, Manifest] | None:
        """(state folder, manifest) of the newest checkpoint whose files are what was written, if there is any.

        `latest` is for people; a checkpoint renamed into place counts even if the process died before naming it.
        """
        for step in self._steps():
            path = self._path(step)
            try:
                manifest = Manifest.read(path / "manifest.json")
                wrong = [name for name, value in manifest.files.items() if digest(path / "state" / name) != value]
            except (OSError, ValueError, KeyError, TypeError) as error:
                get_logger().warning("checkpoint_unreadable", folder=str(path), reason=repr(error))
                continue
            if wrong:
                get_logger().warning("checkpoint_damaged", folder=str(path), files=wrong)
                continue
            return path / "state", manifest
        return None

    def _steps(self) -> list[int]:
        names = (path.name.removeprefix("step_") for path in self._folder.glob("step_*"))
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step}"


def _no_space(folder: Path, needed: int | None, free: int) -> UserError:
    wanted = "" if needed is None else f" needs {needed} bytes and"
    return UserError(
        f"no disk space for a checkpoint: {folder}{wanted} has {free} bytes free: "
        "free some, or set run.dir to another disk"
    )
