"""The trainer's end of `weights_bench.py`: takes GRPO updates, publishes policies, compares what engines rebuilt.

`python sender.py key=value …` reads one order a line, as JSON, and prints one reply a line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import batch as made
import numpy as np
import torch

from forage_proto.v1.trajectory_pb2 import Policy
from forage_queue.streams.client import StreamClient
from forage_runtime.retries import Retries
from forage_runtime.settings import PublishSettings, Settings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.algorithms.estimators.grpo import grpo_outcome
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_weights.cache import PolicyCache
from forage_weights.tensors import open_tensors
from forage_weights.trainer.publisher import PolicyStore, Publisher, measure_published
from forage_weights.trainer.sender_address import open_sender

GROUPS, SAMPLES = 1, 2
"""Few: Adam takes steps of the learning rate however many there are."""


class Sender:
    """A worker with fp32 masters, its published weights in bfloat16, and a publisher for each way."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._streams = StreamClient(settings.redis, settings.run.id)
        self._retries = Retries(Stop(), Health())
        self._retries.redis(self._streams.create_groups)
        self._retries.redis(self._streams.acquire_epoch)
        self._worker = PolicyWorker(settings)
        self._batch = made.tensors(GROUPS, settings.trainer.algorithm, SAMPLES)
        self._advantages = grpo_outcome(self._batch.token_rewards, self._batch.mask, self._batch.uids)
        self._reference = self._worker.reference_log_probs(self._batch)
        self._weights = self._worker.weights(torch.bfloat16)
        self._copy = {name: torch.empty_like(tensor) for name, tensor in self._weights.items()}
        self._publishers = {way: self._make(way) for way in ("files", "direct", "s3")}
        self._policy = Policy()
        self._version = 0

    def _make(self, way: str) -> Publisher:
        run, publish = self._settings.run, self._settings.trainer.publish
        settings: PublishSettings = publish.model_copy(update={"uri": ""} if way != "s3" else {})
        store = PolicyStore(run.folder / f"policies-{way}", settings.uri, run.id, self._retries.storage)
        sender = open_sender(self._settings) if way == "direct" else None
        return Publisher(store, Path(self._settings.model.path), self._streams, settings, self._retries, sender)

    def update(self) -> dict[str, Any]:
        """Take one GRPO update and gather the weights that it leads to."""
        self._worker.update(self._batch, self._advantages, self._reference, None, GROUPS)
        self._weights = self._worker.weights(torch.bfloat16)
        return {}

    def copy(self) -> dict[str, Any]:
        """Copy the whole policy from memory to memory, on one thread; the best of three."""
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            for name, tensor in self._weights.items():
                self._copy[name].copy_(tensor)
            seconds.append(time.perf_counter() - began)
        return {"seconds": min(seconds)}

    def publish(self, way: str, kind: str) -> dict[str, Any]:
        """Publish the weights; the kind is checked, not chosen, where it is a delta."""
        self._version += 1
        began = time.perf_counter()
        policy = self._publishers[way].publish(self._version, self._weights, whole=kind == "whole")
        seconds = time.perf_counter() - began
        if bool(policy.parts) != (kind == "delta"):
            sys.exit(f"version {self._version} was published {'as a delta' if policy.parts else 'whole'}, not {kind}")
        self._policy = policy
        return {
            "policy": policy.SerializeToString().hex(),
            "seconds": seconds,
            "bytes": measure_published(policy),
            "whole_bytes": sum(file.bytes for file in policy.files),
        }

    def compare(self, cache: str) -> dict[str, Any]:
        """Compare the policy on the engines' machine with the trainer's weights, bit by bit."""
        with PolicyCache(Path(cache)).hold(self._policy) as held:
            found = {name: tensor for file in held.files for name, tensor in open_tensors(file).items()}
            identical = found.keys() == self._weights.keys() and all(
                np.array_equal(found[name].bits, tensor.reshape(-1).view(torch.uint16).numpy())
                for name, tensor in self._weights.items()
            )
        return {"identical": identical}


def main(overrides: Sequence[str]) -> None:
    sender = Sender(load_settings(overrides=overrides, environ={}))
    orders: dict[str, Callable[..., dict[str, Any]]] = {
        "update": sender.update,
        "copy": sender.copy,
        "publish": sender.publish,
        "compare": sender.compare,
    }
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(orders[order.pop("do")](**order)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
