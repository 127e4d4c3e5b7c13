"""Publishes the policy: a folder with checksummed weights, renamed into place, announced under the trainer's epoch."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from prometheus_client import Counter, Gauge

from forage_common.errors import UserError
from forage_common.streams.client import StreamClient
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy, PolicyFile
from forage_trainer.files import new_folder, remove, remove_leftovers
from forage_trainer.waiting import Insist
from forage_trainer.weights.weights_files import Adapter, write_adapter_folder, write_model_folder

KEPT = 3
"""Newest folders that stay whoever serves them: a replica may be loading one that it has not acknowledged."""
PUBLISHED = Counter("forage_trainer_policies_published_total", "Policy versions announced")
BYTES = Gauge("forage_trainer_publish_bytes", "Bytes of the weights that were published last")
SECONDS = Gauge("forage_trainer_publish_seconds", "Seconds that the last policy took to write and announce")


class Publisher:
    """Writes and announces versions under one epoch."""

    def __init__(
        self,
        folder: Path,
        model_folder: Path,
        streams: StreamClient,
        epoch: int,
        shard_bytes: int,
        insist: Insist,
    ) -> None:
        """
        Args:
            folder: where version folders go.
            model_folder: the initial policy, whose configuration and tokenizer every version carries.
            shard_bytes: largest file of weights.
        """
        self._folder = folder
        self._model_folder = model_folder
        self._streams = streams
        self._epoch = epoch
        self._shard_bytes = shard_bytes
        self._insist = insist
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def publish(self, version: int, weights: Mapping[str, torch.Tensor] | Adapter) -> Policy:
        """Write the whole policy, or an adapter alone, and announce it. Old folders that no replica serves are deleted.

        Raises:
            FencedError: a newer trainer has taken over.
            UserError: no disk space.
        """
        began = time.perf_counter()
        target = self._folder / f"v{version}-e{self._epoch}"
        try:
            with new_folder(target) as folder:
                if isinstance(weights, Adapter):
                    files = write_adapter_folder(folder, weights)
                else:
                    files = write_model_folder(folder, self._model_folder, weights, self._shard_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"no disk space to publish policy {version} in {self._folder}: "
                "free some, or set run.dir to another disk"
            ) from None
        policy = Policy(
            version=version,
            uri=str(target.resolve()),
            digest=files[0].digest if len(files) == 1 else "",
            epoch=self._epoch,
            published_unix_ms=int(time.time() * 1000),
            files=[PolicyFile(name=file.name, digest=file.digest, bytes=file.bytes) for file in files],
            adapter=isinstance(weights, Adapter),
        )
        self._insist(lambda: self._streams.publish(policy))
        size, seconds = sum(file.bytes for file in files), time.perf_counter() - began
        PUBLISHED.inc()
        BYTES.set(size)
        SECONDS.set(seconds)
        get_logger().info(
            "policy_published",
            version=version,
            epoch=self._epoch,
            digests=[file.digest[:12] for file in files],
            bytes=size,
            seconds=round(seconds, 3),
        )
        self._retire(target)
        return policy

    def _retire(self, current: Path) -> None:
        # Served folders are read after the announcement: a replica may move to the new one, never back.
        serving = self._insist(self._streams.read_replicas)
        served = {Path(policy.uri) for policy in serving.values()} | {current.resolve()}
        newest_first = sorted(self._folder.glob("v*-e*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old in newest_first[KEPT:]:
            if old.resolve() not in served:
                remove(old)
