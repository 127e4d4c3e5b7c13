"""Checkpoints of a run: complete or absent, and kept up to a limit.

The engine's state is written while the run waits. Digests, and the flush to the disk, are made by a thread beside the
next steps; only then the checkpoint has its name.

Layout of `<run folder>/checkpoints/`: `step_<n>/` (see `manifest`), and the files `latest` and `best`, which hold the
names of the newest checkpoint and of the one with the best validation score.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forage_queue.trainer.batcher import ConsumedStep
from forage_runtime.errors import DataError, DiskFullError, UserError
from forage_runtime.files.folders import (
    measure_folder,
    remove_folder,
    remove_leftovers,
    stage_folder,
    write_json,
    write_text,
)
from forage_runtime.security.signatures import RunSignatures, SignatureError
from forage_runtime.settings import SecuritySettings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting
from forage_trainer.checkpoints.manifest import (
    BEST,
    LATEST,
    MANIFEST,
    STATE,
    Manifest,
    Stateful,
    list_checkpoints,
    parse_step,
    read_checkpoint,
    sign_checkpoint,
    stamp_files,
)
from forage_trainer.folder_digests import RANK_DIGESTS, compute_digests

BYTES_PER_PARAMETER = 16
"""Weights and two Adam moments in fp32, and room for the smaller files."""

LISTING_TIMEOUT_S = 90.0
"""Wait for files of other nodes: NFS clients cache a folder's listing for up to a minute."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        parameters: int,
        world_size: int = 1,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        listing_timeout_s: float = LISTING_TIMEOUT_S,
        signatures: RunSignatures | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """
        Args:
            keep: number of newest checkpoints that stay.
            parameters: number of parameters, which gives the size of the first checkpoint.
            world_size: number of processes that train.
            free_bytes: returns the free bytes of the disk that holds a folder.
            listing_timeout_s: longest wait for the files of all processes to be visible.
            signatures: signs and verifies checkpoints; None: nobody does.
            pause: waits for some seconds between two looks at the files of other processes.
        """
        self._folder = folder
        self._keep = keep
        self._parameters = parameters
        self.world_size = world_size
        self._free_bytes = free_bytes
        self._listing_timeout_s = listing_timeout_s
        self._pause = pause
        self._signatures = signatures or RunSignatures(SecuritySettings(), "")
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None
        self._seen: dict[Path, dict[str, tuple[int, ...]]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def require_space(self) -> None:
        """
        Raises:
            DiskFullError: the disk has no room for another checkpoint; the message has folder, needed and free bytes.
        """
        last = self.list_steps()[:1]
        needed = measure_folder(self._path(last[0])) if last else BYTES_PER_PARAMETER * self._parameters
        free = self._free_bytes(self._folder)
        if free < needed:
            raise DiskFullError(
                f"no disk space for a checkpoint: {self._folder} needs {needed} bytes and has {free} bytes free: "
                "free some, or set run.dir to another disk"
            )

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint."""
        return not self.list_steps()

    def begin(
        self,
        step: int,
        epoch: int,
        data: str,
        consumed: tuple[ConsumedStep, ...],
        metrics: dict[str, Any],
        write: Callable[[Path], None],
        parts: Mapping[str, Stateful] | None = None,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the state of a checkpoint, and make it durable on a thread. The one before must be settled.

        The caller acknowledges the consumed groups only after `settle` has returned it. A crash in between makes the
        next process read the groups from the manifest and acknowledge them then, so none is lost or trained on twice.

        Args:
            write: fills a folder with the engine's state.
            parts: other parts with a state, by name.
            confirm: as of `stage_folder`, called on the thread: a later trainer may begin while files are flushed.

        Raises:
            DiskFullError: no disk space.
        """
        if self._writing is not None:
            raise RuntimeError("the checkpoint before this one was not waited for")
        self.require_space()
        target = self._path(step)
        with ExitStack() as staged:
            folder = staged.enter_context(stage_folder(target, confirm))
            state = folder / STATE
            state.mkdir()
            write(state)
            states = {name: part.state_dict() for name, part in (parts or {}).items()}
            manifest = Manifest(step, epoch, data, consumed, metrics, {}, self.world_size, states)
            self._writing = self._threads.submit(self._complete, staged.pop_all(), folder, manifest)

    def poll(self, unscored: Collection[int] = ()) -> Path | None:
        """Return the checkpoint that has become durable since it was begun; None while there is none. As `wait`."""
        return self.wait(unscored) if self._writing is not None and self._writing.done() else None

    def wait(self, unscored: Collection[int] = ()) -> Path | None:
        """Return the checkpoint that was begun, once it is durable; None where none was.

        Args:
            unscored: steps whose validation is under way; their checkpoints stay, however old.

        Raises:
            DiskFullError: no disk space.
            UserError: the files of some process do not appear.
            Exception: `confirm` raised it.
        """
        if self._writing is None:
            return None
        target = self._await_written()
        kept = {self.best_step(), *unscored, *self.list_steps()[: self._keep]}
        for old in self.list_steps():
            if old not in kept:
                remove_folder(self._path(old))
        return target

    def close(self) -> None:
        """Wait for a checkpoint that was begun. The next process acknowledges its groups."""
        if self._writing is not None:
            try:
                self._await_written()
            except Exception as error:  # noqa: BLE001 - must not take the place of the error that ends the run
                get_logger().warning("checkpoint_not_saved", reason=repr(error))

    def _await_written(self) -> Path:
        assert self._writing is not None
        writing, self._writing = self._writing, None
        why = "a full disk ends it, and so does a process whose files do not appear"
        with waiting("a checkpoint to be durable", on="the volume of run.dir", limit_s=None, why_unlimited=why):
            return writing.result()

    def _complete(self, staged: ExitStack, folder: Path, manifest: Manifest) -> Path:
        """Add the manifest, flush everything, and give the folder its name."""
        with staged:
            state = folder / STATE
            self._await_shards(state)
            write_json(folder / MANIFEST, asdict(replace(manifest, files=compute_digests(state))))
            sign_checkpoint(folder, manifest, self._signatures)
        target = self._path(manifest.step)
        write_text(self._folder / LATEST, target.name + "\n")
        return target

    def _await_shards(self, state: Path) -> None:
        """Wait until every file that rank 0 wrote is visible from each other rank too, and then for their digests."""
        own = list(state.rglob("*_rank_0.*"))
        others = range(1, self.world_size)
        expected = [path.with_stem(f"{path.stem.removesuffix('0')}{rank}") for path in own for rank in others]
        deadline = time.monotonic() + self._listing_timeout_s
        with waiting("files of other ranks", on="the volume of run.dir", limit_s=self._listing_timeout_s):
            while missing := set(expected) - set(state.rglob("*_rank_*")):
                if time.monotonic() > deadline:
                    names = ", ".join(sorted(str(path.relative_to(state)) for path in missing)[:4])
                    raise UserError(
                        f"{len(missing)} of {len(own) * self.world_size} files of a checkpoint do not appear in "
                        f"{state} ({names}): run.dir must be on a volume that all nodes of the trainer share"
                    )
                self._pause(0.5)
        described = [state / f"{RANK_DIGESTS}{rank}.json" for rank in range(1, self.world_size)]
        with waiting("digests of other ranks", on="the other ranks", limit_s=self._listing_timeout_s):
            while own and time.monotonic() < deadline and not all(file.is_file() for file in described):
                self._pause(0.1)  # wait: those that do not come are computed here

    def best_step(self) -> int | None:
        """The step that the file `best` names; None without the file or its checkpoint."""
        try:
            step = int((self._folder / BEST).read_text(encoding="utf-8").strip().removeprefix("step_"))
        except (OSError, ValueError):
            return None
        return step if self._path(step).is_dir() else None

    def mark_best(self, scores: Mapping[int, float]) -> int | None:
        """Name the existing checkpoint with the highest score in the file `best`, the first one of equals.

        Args:
            scores: step → validation score.
        """
        scored = [step for step in sorted(self.list_steps()) if step in scores]
        best = max(scored, key=scores.__getitem__, default=None)
        if best is not None and best != self.best_step():
            write_text(self._folder / BEST, self._path(best).name + "\n")
            get_logger().info("best_checkpoint", step=best, score=scores[best])
        return best

    def highest_epoch(self) -> int:
        """The highest epoch of a trainer that wrote one of the checkpoints; 0 without any."""
        epochs = [0]
        for path in list_checkpoints(self._folder):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # `find_newest` reports a damaged one
                epochs.append(Manifest.read(path / MANIFEST).epoch)
        return max(epochs)

    def oldest_kept(self) -> int:
        """The step of the oldest of the newest checkpoints; 0 while there is one alone."""
        kept = self.list_steps()[: self._keep]
        return kept[-1] if len(kept) > 1 else 0

    def find_newest(self, verify: bool = True) -> tuple[Path, Manifest] | None:
        """Find the newest undamaged checkpoint: (state folder, manifest), or None.

        The file `latest` is not read: a process can die between the rename of a checkpoint and the update of `latest`.

        Args:
            verify: as of `read_checkpoint`.

        Raises:
            UserError: one is not signed as it must be. It is not skipped: no damage of a disk makes such a checkpoint,
                and a run that begins anew instead would lose its work.
        """
        for step in self.list_steps():
            state = self._path(step) / STATE
            try:
                self._seen = {state: stamp_files(state)}  # before the digests: what is written meanwhile differs
                return state, read_checkpoint(self._path(step), self._signatures, verify)
            except SignatureError as error:
                raise UserError(
                    f"{error}: if you trust it, resume once with security.require_signed=false; else remove its folder"
                ) from None
            except DataError as error:
                get_logger().warning("checkpoint_skipped", reason=str(error))
        return None

    def require_unchanged(self, state: Path) -> None:
        """Return if what has been loaded from a state folder is what `find_newest` has verified.

        A copy would be safe without this, and twice as large as what is often the largest thing on a disk. Times of
        change (ctime) cannot be set back by who may write to a file.

        Raises:
            UserError: signatures are required, and a file was written to, replaced, added or removed meanwhile.
        """
        if not self._signatures.is_required or (now := stamp_files(state)) == (before := self._seen.get(state, {})):
            return
        name = min(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
        raise UserError(
            f"{state / name} was changed while the checkpoint was verified and loaded, and security.require_signed is"
            " set: find out who writes there, and start again"
        )

    def list_steps(self) -> list[int]:
        """List the steps of all checkpoints, the newest first."""
        return sorted((parse_step(path) for path in list_checkpoints(self._folder)), reverse=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step}"
