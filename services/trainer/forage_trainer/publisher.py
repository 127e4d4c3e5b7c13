"""Publishes the policy: a checksummed safetensors folder, renamed into place, announced under the trainer's epoch."""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from prometheus_client import Counter
from safetensors.torch import save_file

from forage_common.errors import UserError
from forage_common.streams import StreamClient
from forage_common.telemetry import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_trainer.files import digest, new_folder, remove_leftovers
from forage_trainer.waiting import Insist

WEIGHTS = "model.safetensors"
KEPT = 3
"""Newest folders that stay whoever serves them: a replica may be loading one that it has not acknowledged."""
_COPIED = {".json", ".txt", ".jinja", ".model"}
PUBLISHED = Counter("forage_trainer_policies_published_total", "Policy versions announced")


class Publisher:
    """Writes and announces versions under one epoch."""

    def __init__(self, folder: Path, model_folder: Path, streams: StreamClient, epoch: int, insist: Insist) -> None:
        """
        Args:
            folder: where version folders go.
            model_folder: the initial policy, whose configuration and tokenizer every version carries.
        """
        self._folder = folder
        self._model_folder = model_folder
        self._streams = streams
        self._epoch = epoch
        self._insist = insist
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> Policy:
        """Write the weights and announce them. Old folders that no replica serves are deleted.

        Raises:
            FencedError: a newer trainer has taken over.
            UserError: no disk space.
        """
        target = self._folder / f"v{version}-e{self._epoch}"
        try:
            checksum = self._write(target, weights)
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
            digest=checksum,
            epoch=self._epoch,
            published_unix_ms=int(time.time() * 1000),
        )
        self._insist(lambda: self._streams.publish(policy))
        PUBLISHED.inc()
        get_logger().info("policy_published", version=version, epoch=self._epoch, digest=checksum[:12])
        self._retire(target)
        return policy

    def _write(self, target: Path, weights: Mapping[str, torch.Tensor]) -> str:
        with new_folder(target) as folder:
            for source in sorted(self._model_folder.iterdir()):
                if source.suffix in _COPIED and not source.name.endswith(".index.json"):
                    shutil.copyfile(source, folder / source.name)
            dtype = next(iter(weights.values())).dtype
            config = with_dtype(json.loads((self._model_folder / "config.json").read_text()), dtype)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            save_file(dict(weights), folder / WEIGHTS, metadata={"format": "pt"})
            return digest(folder / WEIGHTS)

    def _retire(self, current: Path) -> None:
        # Served folders are read after the announcement: a replica may move to the new one, never back.
        serving = self._insist(self._streams.replicas)
        served = {Path(policy.uri) for policy in serving.values()} | {current.resolve()}
        newest_first = sorted(self._folder.glob("v*-e*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old in newest_first[KEPT:]:
            if old.resolve() not in served:
                shutil.rmtree(old)


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A model configuration that says which type its weights have."""
    return {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": str(dtype).removeprefix("torch.")}
