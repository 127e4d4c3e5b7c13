"""The whole stack with the direct transport: the trainer sends deltas, and the engine applies them."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

from chaos.transports import count_ways
from demo import Demo

ENOUGH = 4
SETTINGS = (
    "rollout.weights.transport=direct",
    "trainer.publish.dtype=bfloat16",  # in which a small step changes few elements
    "trainer.publish.full_every=3",
    "trainer.actor.optim.lr=1e-5",
    "trainer.val_before_train=false",
    "run.record_history=true",
)
DELTAS, BYTES = "forage_trainer_deltas_published_total", "forage_trainer_direct_bytes_total"
RECEIVED, FALLBACKS = "forage_rollout_direct_transfers_total", "forage_rollout_direct_fallbacks_total"


def read_metrics(demo: Demo) -> dict[str, float]:
    """The series without labels of trainer and rollout service; none while one does not answer."""
    found: dict[str, float] = {}
    for job in ("trainer", "rollout"):
        try:
            with urllib.request.urlopen(f"http://{demo.metrics[job]}/metrics", timeout=60) as reply:
                text = reply.read().decode()
        except OSError:
            return {}
        found |= {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}
    return found


def test_an_engine_receives_deltas_from_the_trainer_and_samples_from_them(
    small_demo: Callable[..., Demo], tmp_path: Path
) -> None:
    demo = small_demo(10_000, *SETTINGS, f"rollout.weights.cache_dir={tmp_path / 'cache'}")
    demo.start("--seed", "3", "--base-port", str(demo.base_port))

    def read_enough() -> dict[str, float]:
        counts = read_metrics(demo)
        return counts if min(counts.get(name, 0) for name in (DELTAS, RECEIVED)) > ENOUGH else {}

    counts = demo.wait_for(read_enough)
    demo.interrupt()
    assert demo.finish() == 130, demo.output[-3000:]
    assert counts[BYTES] > 0
    assert counts[FALLBACKS] == 0
    history, ways = demo.history, count_ways(demo.run)
    assert history.violations == ()
    assert history.steps > 0
    assert min(ways.whole, ways.applied) > 1, "whole policies and deltas take turns, and both are loaded"
    assert ways.sent >= counts[RECEIVED]
    assert (ways.fallbacks, ways.refused) == (0, 0)
    whole = max(file.stat().st_size for file in (demo.run / "policies").glob("*/model.safetensors"))
    assert ways.sent_bytes < ways.sent * whole / 2, "most of what was sent are deltas"
    assert demo.list_leftovers() == [], "the run left processes behind"
