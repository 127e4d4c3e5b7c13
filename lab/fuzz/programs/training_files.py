"""Files of checkpoints and policies, and announcements. In the environment of the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from policy_files import Publications
from trainer_parts import make_group

from forage_proto.v1.trajectory_pb2 import Policy, TrajectoryGroup
from forage_queue.trainer import feeder, spans
from forage_queue.trainer.batcher import oldest_version
from forage_queue.trainer.feeder import refill_number
from forage_records.step_file import StepRow, read_step, write_step
from forage_runtime.settings import TrainerSettings
from forage_trainer.checkpoints.manifest import read_checkpoint
from forage_trainer.data.digests import digest_tokens
from forage_trainer.data.tensors import build_step_tensors, leave_out_unusable, select_trajectories
from forage_trainer.folder_digests import compute_digests
from forage_trainer.reporting.metrics import compute_trajectory_metrics
from forage_trajectory.codec import decode_group, pack_group
from forage_weights.announcement import list_parts, verify_files
from forage_weights.cache import PolicyCache
from forage_weights.delta import patch_files, read_delta, read_positions
from forage_weights.tensors import open_tensors, read_headers

REFUSALS: dict[str, tuple[type[Exception], ...]] = {
    "announcement": (DecodeError,),
    "cached": (DecodeError,),
    "tensors": (ValueError,),
    "group": (DecodeError,),
}
"""Reader → what it says that it raises, besides the errors of Forage: its callers turn that into one."""


def list_good_files(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """(reader, name, content) of good files."""
    checkpoint = _write_checkpoint(folder / "checkpoints")
    yield "checkpoint", "manifest.json", (checkpoint / "manifest.json").read_bytes()
    policies, policy = _publish(folder)
    yield "tensors", "a.safetensors", (policies / "v1/a.safetensors").read_bytes()
    yield "delta", "delta", (policies / "v2/delta").read_bytes()
    for part in (policy, *policy.parts):  # the same in every folder, so that a seed means the same inputs
        part.uri = f"/nowhere/v{part.version}"
    yield "announcement", "policy", policy.SerializeToString()
    yield "cached", "policy", policy.SerializeToString()
    for rewards in ([0.0, 1.0], [1.0]):
        yield "group", "group", make_group("q/train/1/0", rewards, 1, 0).SerializeToString()


def make_readers(folder: Path) -> dict[str, Callable[[Path, str], Any]]:
    """The readers by name. Each takes the path of a file, and its name."""
    checkpoint = _write_checkpoint(folder / "checkpoints")
    policies, _ = _publish(folder)
    whole = policies / "v1"
    before = {file: file.read_bytes() for file in sorted(whole.glob("*.safetensors"))}

    def read_manifest(file: Path, name: str) -> None:
        (checkpoint / "manifest.json").write_bytes(file.read_bytes())
        manifest = read_checkpoint(checkpoint)
        _ = [(step.step, step.epoch, [group.entry for group in step.groups]) for step in manifest.consumed]

    def read_tensors(file: Path, name: str) -> None:
        for info in read_headers([file]).values():
            _ = info.elements * info.width
        for tensor in open_tensors(file).values():
            _ = tensor.bits.size

    def read_a_delta(file: Path, name: str) -> None:
        read_delta(file)
        read_positions(file)
        try:
            patch_files(file, list(before))
        finally:
            for target, content in before.items():
                target.write_bytes(content)

    def read_announcement(file: Path, name: str) -> None:
        policy = Policy.FromString(file.read_bytes())
        list_parts(policy)
        verify_files(policy, whole)

    cache = PolicyCache(folder / "cache", work_limit_s=5.0, readers_limit_s=5.0)

    def read_through_cache(file: Path, name: str) -> None:
        policy = Policy.FromString(file.read_bytes())
        # Only folders of this machine: a hostile address is the subject of another check, and would be slow.
        for part in (policy, *policy.parts):
            if not part.uri.startswith(str(folder)):
                part.uri = str(whole)
        with cache.hold(policy) as held:
            _ = held.files

    settings = TrainerSettings()

    def read_group(file: Path, name: str) -> None:
        """What a step does with a group before the model sees it."""
        message = TrajectoryGroup.FromString(file.read_bytes())
        group = decode_group(pack_group(message))
        spans.record_claim(group)
        spans.record_drop(group, "stale")
        oldest_version(group)
        feeder.has_outage(group)
        refill_number(group.group_uid)
        compute_trajectory_metrics([group], 1)
        left, _ = leave_out_unusable([group], settings)
        selected = select_trajectories(left, settings.algorithm)
        build_step_tensors(selected, 1, 1, 0, settings.algorithm)
        digest_tokens([group])
        write_step(file.with_suffix(".parquet"), "", [StepRow(t, 1, 1, False) for t in message.trajectories])
        list(read_step(file.with_suffix(".parquet")))

    return {
        "group": read_group,
        "checkpoint": read_manifest,
        "tensors": read_tensors,
        "delta": read_a_delta,
        "announcement": read_announcement,
        "cached": read_through_cache,
    }


def _publish(folder: Path) -> tuple[Path, Policy]:
    published = Publications(str(folder / "policies"), folder / "scratch", elements=300)
    published.publish()
    return folder / "policies", published.publish()


def _write_checkpoint(folder: Path) -> Path:
    checkpoint = folder / "step_4"
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "state/model.bin").write_bytes(b"weights")
    group = {"batch": 4, "position": 0, "attempt": 0, "uid": "w/train/1/0", "entry": "1-0"}
    tree = {
        "step": 4,
        "epoch": 1,
        "data": "d" * 64,
        "consumed": [{"step": 4, "epoch": 1, "groups": [group], "dropped": ["w/train/2/0"]}],
        "figures": {"reward": 0.5, "seconds": {"update": 1.0}},
        "files": compute_digests(checkpoint / "state"),
        "world_size": 1,
        "parts": {"kl": {"beta": 0.1}},
    }
    (checkpoint / "manifest.json").write_text(json.dumps(tree))
    return checkpoint
