"""The baseline: plain protobuf, decoded by rank 0, and every tensor of every row broadcast to every rank.

This is how the trainer worked before its ranks read their own rows, without what it did besides.
"""

from __future__ import annotations

import hashlib
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from google.protobuf.proto import serialize_length_prefixed

from forage_proto.v1.trajectory_pb2 import Trajectory, TrajectoryGroup
from forage_runtime.files import durable
from forage_trainer.data.rows import distribute_rows

FLAT = ("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask", "state_mask", "log_probs")


def build(groups: list[TrajectoryGroup]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Build what every rank gets, and the matrices that rank 0 needs besides."""
    rows = [t for group in groups for t in group.trajectories]
    tokens = [np.asarray(t.token_ids, dtype=np.int64) for t in rows]
    states = [np.asarray(t.loss_mask, dtype=np.float32) for t in rows]
    log_probs = [np.asarray(t.logprobs, dtype=np.float32) for t in rows]
    parts = {
        "input_ids": tokens,
        "position_ids": [np.arange(len(row)) for row in tokens],
        "prompts": [row[: t.prompt_length] for row, t in zip(tokens, rows, strict=True)],
        "responses": [row[t.prompt_length :] for row, t in zip(tokens, rows, strict=True)],
        "response_mask": states,
        "loss_mask": states,
        "state_mask": states,
        "log_probs": log_probs,
    }
    everything = {name: torch.cat([torch.from_numpy(row) for row in parts[name]]) for name in FLAT}
    everything["lengths"] = torch.tensor([[len(row), t.prompt_length] for row, t in zip(tokens, rows, strict=True)])
    everything["mask"] = _pad(states)
    rewards = [np.zeros(len(row)) for row in states]
    for row, t in zip(rewards, rows, strict=True):
        row[np.flatnonzero(t.loss_mask)[-1]] = t.score.total
    turns = [np.asarray(t.turn_ids, dtype=np.int64) for t in rows]
    matrices = {"rewards": _pad(rewards), "log_probs": _pad(log_probs), "turn_ids": _pad(turns), "state": _pad(states)}
    return everything, matrices


def describe(groups: list[TrajectoryGroup]) -> str:
    """Compute what a step's metrics and digest need of every token."""
    digest = hashlib.sha256()
    for trajectory in (t for group in groups for t in group.trajectories):
        sampled = sum(trajectory.loss_mask)
        digest.update(f"{len(trajectory.token_ids)}/{sampled}".encode())
        _digest(digest, trajectory)
    return digest.hexdigest()


def keep(groups: list[TrajectoryGroup], file: Path) -> None:
    """Write the groups durably."""
    content = BytesIO()
    for group in groups:
        serialize_length_prefixed(group, content)
    data = content.getvalue()
    with durable.stage_file(file.with_suffix(f".{hashlib.sha256(data).hexdigest()}")) as partial:
        partial.write_bytes(data)


def broadcast(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Broadcast tensors of rank 0, by name; the others give none."""
    described = [{name: (value.dtype, value.shape) for name, value in tensors.items()}]
    dist.broadcast_object_list(described, src=0)
    for name, (dtype, shape) in described[0].items():
        if rank:
            tensors[name] = torch.empty(shape, dtype=dtype)
        dist.broadcast(tensors[name], src=0)
    return tensors


def select_share(everything: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    """Select a rank's rows."""
    lengths, prompts = everything["lengths"].unbind(1)
    rows = [row for row in distribute_rows(lengths.tolist(), size)[rank] if row >= 0]
    share = {}
    for name in FLAT:
        sizes = {"prompts": prompts, "input_ids": lengths, "position_ids": lengths}.get(name, lengths - prompts)
        every = everything[name].split(sizes.tolist())
        share[name] = [torch.cat([every[row] for row in rows])]
    return share


def _pad(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


def _digest(digest: hashlib._Hash, trajectory: Trajectory) -> None:
    for values, kind in (
        (trajectory.token_ids, np.uint32),
        (trajectory.loss_mask, np.uint8),
        (trajectory.logprobs, np.float32),
    ):
        digest.update(np.asarray(values, dtype=kind).tobytes())
