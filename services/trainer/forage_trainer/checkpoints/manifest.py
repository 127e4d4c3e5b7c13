"""The manifest of a checkpoint: what the trainer must remember besides weights, and the digests of all files.

Layout of a checkpoint: `step_<n>/manifest.json` and `step_<n>/state/`, see `engine.engine_state`; where the trainer has
a key to sign with, `step_<n>/manifest.sig`, the signature of the manifest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forage_queue.trainer.batcher import ConsumedGroup, ConsumedStep
from forage_runtime.errors import DataError
from forage_runtime.security.signatures import Purpose, RunSignatures, SignatureError
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.folder_digests import find_altered
from forage_weights.digests import compute_digest

LATEST, BEST, MANIFEST, STATE = "latest", "best", "manifest.json", "state"
SIGNATURE = "manifest.sig"
_LONGEST_SIGNATURE = 1000


class Stateful(Protocol):
    """A part of the trainer whose state survives a restart. The state is plain JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    step: optimizer steps taken; with trainer.batching=strict it is the data cursor too, since batch n feeds step n.
        With ready that is `forage_queue.trainer.slots.ConsumedSlots`, one of the parts.
    epoch: of the trainer that wrote the checkpoint.
    data: digest of the training files.
    consumed: steps since the previous checkpoint, whose groups are acknowledged once this one is durable.
    figures: the step's metrics, as in its line of the metrics file (the name is that of existing manifests).
    files: digest of each file below `state/`, by relative path; SHA-256 in checkpoints of version 0.1.
    world_size: number of processes that wrote `state/`.
    parts: `Stateful.state_dict` by name.
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
        return cls.parse(path.read_bytes())

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        tree = json.loads(text)
        steps = [
            ConsumedStep(
                s["step"],
                s["epoch"],
                tuple(ConsumedGroup(**g) for g in s["groups"]),
                tuple(s.get("dropped", ())),
                tuple(s["ends"]),
            )
            for s in tree["consumed"]
        ]
        return cls(**(tree | {"consumed": tuple(steps)}))

    def restore_parts(self, parts: Mapping[str, Stateful]) -> None:
        """Load the state of every part; a part that the checkpoint lacks keeps its initial state and logs a warning."""
        for name, part in parts.items():
            if name in self.parts:
                part.load_state_dict(self.parts[name])
            else:
                get_logger().warning("state_not_in_checkpoint", part=name, step=self.step)


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a folder, the oldest first."""
    return sorted((path for path in folder.glob("step_*") if path.name[5:].isdigit()), key=parse_step)


def parse_step(checkpoint: Path) -> int:
    """Read the step from a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))


def read_checkpoint(folder: Path, signatures: RunSignatures | None = None, verify: bool = True) -> Manifest:
    """Read the manifest of a checkpoint, after verifying the digest of each of its files.

    Args:
        signatures: verify the manifest's signature; a checkpoint that is signed has no files but its own.
        verify: read the files, which takes minutes for a large model; without it a damaged one is not found.

    Raises:
        SignatureError: it is not signed as it must be.
        DataError: the folder is no checkpoint, or a file is missing, altered or added.
    """
    added: list[str] = []
    try:
        text = (folder / MANIFEST).read_bytes()
        manifest = Manifest.parse(text)
        if signatures is not None and _verify_signature(folder, manifest, text, signatures):
            state = folder / STATE
            there = {
                str(path.relative_to(state)) for path in state.rglob("*") if not path.is_dir() or path.is_symlink()
            }
            added = sorted(there - manifest.files.keys())
        altered = find_altered(folder / STATE, manifest.files) if verify else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{folder} is no complete checkpoint ({error!r}): take another") from None
    if altered or added:
        which = [*(f"{name} changed" for name in altered), *(f"{name} added" for name in added)]
        raise DataError(f"the checkpoint {folder} is damaged ({', '.join(which)} since): take another")
    return manifest


def stamp_files(state: Path) -> dict[str, tuple[int, ...]]:
    """What changes when a file of a state folder is written, replaced, added or removed; {} where it is gone."""
    stamps: dict[str, tuple[int, ...]] = {}
    for path in state.rglob("*"):
        with contextlib.suppress(OSError):  # it is being removed; a checkpoint that lacks it is refused
            stat = path.stat()
            stamps[str(path.relative_to(state))] = stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    return stamps


def sign_checkpoint(folder: Path, manifest: Manifest, signatures: RunSignatures) -> None:
    """Sign the manifest that lies in a folder; nothing happens without a key."""
    if signatures.signs:
        content = _describe(manifest, (folder / MANIFEST).read_bytes())
        (folder / SIGNATURE).write_text(signatures.sign(Purpose.CHECKPOINT, content) + "\n", encoding="utf-8")


def _verify_signature(folder: Path, manifest: Manifest, text: bytes, signatures: RunSignatures) -> str:
    """The id of the key that has signed a manifest; empty: nobody has, or there is no key to tell.

    Raises:
        SignatureError: it is not signed as it must be.
    """
    try:
        with (folder / SIGNATURE).open(encoding="ascii", errors="replace") as stream:
            signature = stream.read(_LONGEST_SIGNATURE).strip()
    except FileNotFoundError:
        signature = ""
    key = signatures.require(Purpose.CHECKPOINT, _describe(manifest, text), signature, f"the checkpoint {folder}")
    if key and folder.name != f"step_{manifest.step}":
        raise SignatureError(f"the checkpoint {folder} is signed as that of step {manifest.step}")
    return key


def _describe(manifest: Manifest, text: bytes) -> dict[str, Any]:
    return {"step": manifest.step, "epoch": manifest.epoch, "manifest": compute_digest(text)}
