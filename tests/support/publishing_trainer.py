"""`python publishing_trainer.py REDIS_URL RUN MODEL FOLDER`: publishes policies that differ much, upon lines of JSON.

{"share": …, "epoch": …} changes a share of the elements of the model: all of them make another model, few change what
the last such model was. The first policy of an epoch is version 0. Printed are version and epoch, how many deltas lead
to it, and a folder with the same weights that `Publisher` had no part in.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from forage_queue.streams.client import StreamClient
from forage_runtime.retries import Retries
from forage_runtime.settings import PublishSettings, RedisSettings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import configure_logs
from forage_weights.trainer.publisher import PolicyStore, Publisher

Weights = dict[str, torch.Tensor]
DENSE, SPARSE = 0.05, 0.5
"""How much an element changes, relative to itself, where all change and where few do."""


def main() -> None:
    """Obey the lines until the input ends."""
    url, run, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    configure_logs("trainer")
    torch.manual_seed(0)
    retries = Retries(Stop(), Health())
    first = anchor = load_file(model / "model.safetensors")
    publisher, version, epoch = None, 0, 0
    write_line({})
    for line in sys.stdin:
        order = json.loads(line)
        if publisher is None or order["epoch"] != epoch:
            version, epoch = -1, order["epoch"]
            streams = StreamClient(RedisSettings(url=url), run, 2.0)
            streams.epoch = epoch
            store = PolicyStore(folder / "policies", "", run, retries.storage)
            publisher = Publisher(store, model, streams, PublishSettings(shard_bytes=2_000_000), retries)
        if order["share"] == 1:
            weights = anchor = change(first, 1, DENSE)
        else:
            weights = change(anchor, order["share"], SPARSE)
        version += 1
        truth = folder / f"truth/v{version}-e{epoch}"
        truth.mkdir(parents=True)
        shutil.copy(model / "config.json", truth)
        save_file(weights, truth / "model.safetensors", {"format": "pt"})
        policy = publisher.publish(version, weights)
        deltas = max(0, len(policy.parts) - 1)
        write_line({"version": version, "epoch": epoch, "deltas": deltas, "folder": str(truth)})


def change(weights: Weights, share: float, by: float) -> Weights:
    """Multiply a share of the elements by random factors."""
    return {
        name: torch.where(torch.rand(w.shape) < share, w * (1 + by * torch.randn(w.shape)), w)
        for name, w in weights.items()
    }


def write_line(answer: dict[str, object]) -> None:
    """Write an answer, one line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
