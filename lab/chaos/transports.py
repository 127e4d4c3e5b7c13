"""The ways in which policies reach the engines, one for each episode, and how many took them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3_server import BUCKET

from chaos.kinds import COPIES
from chaos.recomputation import SAVED_EVERY, read_lines

TRANSPORTS = ("files", "delta", "direct", "s3")
"""Whole files; what each step has changed, through files; the same, sent by the trainer; the same, in an object
store."""
_DELTAS = ("trainer.publish.dtype=bfloat16", "trainer.publish.full_every=3", "trainer.actor.optim.lr=3e-5")
"""In bfloat16 such a step changes few elements; the demo's learning rate would change most, and publish them whole."""
_SETTINGS = {
    "files": ("trainer.publish.full_every=1",),
    "delta": _DELTAS,
    "direct": (*_DELTAS, "rollout.weights.transport=direct"),
    "s3": (*_DELTAS, f"trainer.publish.uri=s3://{BUCKET}/runs"),
}


def list_settings(transport: str, folder: Path) -> Sequence[str]:
    """The settings of an episode whose policies take this way, with a cache of its own."""
    own = (f"rollout.weights.cache_dir={folder / COPIES}", f"trainer.rollout_data_freq={SAVED_EVERY}")
    return (*_SETTINGS[transport], *own)


@dataclass(frozen=True)
class Ways:
    """How the policies of a run were published and loaded.

    Attributes:
        whole, deltas: policies that were announced whole, and as what a step changed.
        applied: policies that an engine loaded as deltas.
        sent, sent_bytes: transfers of the trainer to an engine.
        fallbacks: folders that the trainer was to send, and that the engine read itself.
        refused: loads that an engine refused.
    """

    whole: int = 0
    deltas: int = 0
    applied: int = 0
    sent: int = 0
    sent_bytes: int = 0
    fallbacks: int = 0
    refused: int = 0

    def __add__(self, other: Ways) -> Ways:
        return Ways(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def count_ways(run: Path) -> Ways:
    """Read them from the history and the logs of a run."""
    counts: Counter[str] = Counter()
    for file in (run / "history").glob("*.jsonl"):
        begun: dict[int, dict[str, Any]] = {}
        for row in read_lines(file):
            begun.setdefault(row.get("n", 0), {}).update(row)
        for row in begun.values():
            is_delta = bool(row.get("parts"))
            if row.get("op") == "publish" and row.get("result") == "ok":
                counts["deltas" if is_delta else "whole"] += 1
            elif row.get("op") == "load":
                counts["applied"] += is_delta and row.get("result") == "ok"
                counts["refused"] += str(row.get("result")).startswith("PolicyError")
    for row in read_lines(run / "logs/trainer.log"):
        if row.get("event") == "policy_sent":
            counts["sent"] += 1
            counts["sent_bytes"] += row["bytes"]
    for row in read_lines(run / "logs/rollout.log"):
        counts["fallbacks"] += row.get("event") == "policy_not_received"
    return Ways(**counts)
