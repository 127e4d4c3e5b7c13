"""Publication of policies: a complete folder of weights with digests, announced under the trainer's epoch.

Replicas learn of a version only by the announcement, which comes after the folder is durable and under its final name,
so none can load a part of it. Redis refuses the announcement of a trainer with an older epoch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from prometheus_client import Counter, Gauge

from forage_common.streams.client import LIVELY_S, StreamClient
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy, PolicyFile
from forage_trainer.files import compute_digest, remove_folder, remove_leftovers, stage_folder
from forage_trainer.waiting import RedisRetry
from forage_trainer.weights.model_files import Adapter, write_adapter_folder, write_model_folder

KEEP_NEWEST = 3
"""Newest folders that always stay: a replica may be loading one that it has not acknowledged yet."""
PUBLISHED = Counter("forage_trainer_policies_published_total", "Policy versions announced")
BYTES = Gauge("forage_trainer_publish_bytes", "Bytes of weights of the last published policy")
SECONDS = Gauge("forage_trainer_publish_seconds", "Seconds to write and announce the last policy")


def highest_epoch(folder: Path) -> int:
    """The highest epoch in the names of the policies of a folder; 0 without any."""
    names = [path.name.rpartition("-e")[2] for path in folder.glob("v*-e*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


class Publisher:
    """Writes and announces versions under the epoch of its client."""

    def __init__(
        self,
        folder: Path,
        model_folder: Path,
        streams: StreamClient,
        shard_bytes: int,
        retry: RedisRetry,
    ) -> None:
        """
        Args:
            folder: parent of the version folders.
            model_folder: the initial policy, whose configuration and tokenizer every version contains.
            shard_bytes: size limit of a file of weights.
        """
        self._folder = folder
        self._model_folder = model_folder
        self._streams = streams
        self._shard_bytes = shard_bytes
        self._retry = retry
        self._policy: Policy | None = None
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def publish(self, version: int, weights: Mapping[str, torch.Tensor] | Adapter) -> Policy:
        """Write the whole policy, or an adapter alone, and announce it. Delete old folders that no replica serves.

        Raises:
            FencedError: a newer trainer has taken over.
            DiskFullError: the disk has no room for it.
        """
        began = time.perf_counter()
        target = self._folder / f"v{version}-e{self._streams.epoch}"
        with stage_folder(target) as folder:
            if isinstance(weights, Adapter):
                files = write_adapter_folder(folder, weights)
            else:
                files = write_model_folder(folder, self._model_folder, weights, self._shard_bytes)
        policy = Policy(
            version=version,
            uri=str(target.resolve()),
            digest=files[0].digest if len(files) == 1 else "",
            epoch=self._streams.epoch,
            published_unix_ms=int(time.time() * 1000),
            files=[PolicyFile(name=file.name, digest=file.digest, bytes=file.bytes) for file in files],
            adapter=isinstance(weights, Adapter),
        )
        self._announce(policy)
        self._policy = policy
        size, seconds = sum(file.bytes for file in files), time.perf_counter() - began
        PUBLISHED.inc()
        BYTES.set(size)
        SECONDS.set(seconds)
        get_logger().info(
            "policy_published",
            version=version,
            epoch=self._streams.epoch,
            digests=[file.digest[:12] for file in files],
            bytes=size,
            seconds=round(seconds, 3),
        )
        self._delete_unserved(target)
        return policy

    def announce_again(self) -> None:
        """Announce the last policy again if the server has lost the announcement."""
        if self._policy is not None and self._retry(self._streams.read_policy) != self._policy:
            get_logger().warning("policy_announced_again", version=self._policy.version)
            self._announce(self._policy)

    def is_damaged(self) -> bool:
        """Whether no replica serves the last policy, and its files are not what was announced."""
        if self._policy is None or self._policy in self._retry(self._read_lively).values():
            return False
        folder = Path(self._policy.uri)
        try:
            return any(compute_digest(folder / file.name) != file.digest for file in self._policy.files)
        except OSError:
            return True

    def _read_lively(self) -> dict[str, Policy]:
        return {name: replica.serving for name, replica in self._streams.read_replicas(LIVELY_S).items()}

    def _announce(self, policy: Policy) -> None:
        self._retry(lambda: self._streams.publish(policy))

    def _delete_unserved(self, current: Path) -> None:
        self._retry(self._streams.prune)
        # Read after the announcement: from then on a replica moves to the new version only, never to an old one.
        serving = self._retry(self._streams.read_replicas)
        served = {Path(replica.serving.uri) for replica in serving.values()} | {current.resolve()}
        newest_first = sorted(self._folder.glob("v*-e*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old in newest_first[KEEP_NEWEST:]:
            if old.resolve() not in served:
                remove_folder(old)
