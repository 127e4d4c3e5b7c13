"""Publishing a policy, flushed, checksummed and announced, against a flushed copy of the same files.

`python publishing.py ROUNDS key=value …`, with a Redis server at the settings' address, prints one line a round:
`{"tiny policy": [seconds to publish, seconds to copy], …}`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from forage_queue.streams.client import StreamClient
from forage_runtime.files import durable
from forage_runtime.files.model_folder import WEIGHTS
from forage_runtime.retries import Retries
from forage_runtime.settings import Settings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_weights.trainer.publisher import KEEP_NEWEST, PolicyStore, Publisher

_SHAPE, _TENSORS = (2000, 2048), 32


class Publishing:
    """A publisher, and the weights of both policies."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.run.folder / "policies"
        streams, retries = StreamClient(settings.redis, settings.run.id), Retries(Stop(), Health())
        retries.redis(streams.create_groups)
        retries.redis(streams.acquire_epoch)
        model = Path(settings.model.path)
        # Whole policies: the rounds publish the same weights again and again.
        whole = settings.trainer.publish.model_copy(update={"full_every": 1})
        store = PolicyStore(self._folder, whole.uri, settings.run.id, retries.storage)
        self._publisher = Publisher(store, model, streams, whole, retries)
        self._version = 0
        draw = torch.Generator().manual_seed(0)
        self._weights: dict[str, Mapping[str, torch.Tensor]] = {
            "tiny policy": load_file(model / WEIGHTS),
            "130M parameters": {f"layers.{n}.weight": torch.randn(_SHAPE, generator=draw) for n in range(_TENSORS)},
        }

    def round(self) -> dict[str, tuple[float, float]]:
        """Each policy → seconds to publish it, seconds to copy it."""
        return {name: self._both(weights) for name, weights in self._weights.items()}

    def _both(self, weights: Mapping[str, torch.Tensor]) -> tuple[float, float]:
        self._version += 1
        began = time.perf_counter()
        policy = self._publisher.publish(self._version, weights)
        published, source, target = time.perf_counter(), Path(policy.uri), self._folder / "copy"
        target.mkdir()
        for file in source.iterdir():
            shutil.copyfile(file, target / file.name)
            durable.sync(target / file.name)
        copied = time.perf_counter()
        shutil.rmtree(target)
        return published - began, copied - published


def main(rounds: int, overrides: Sequence[str]) -> None:
    settings = load_settings(overrides=overrides, environ={})
    publishing = Publishing(settings)
    # Until old folders are deleted every file comes to memory that was never used, which costs a virtual machine most.
    for _ in range(KEEP_NEWEST):
        publishing.round()
    for _ in range(rounds):
        print(json.dumps(publishing.round()), flush=True)
    shutil.rmtree(settings.run.folder / "policies")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
