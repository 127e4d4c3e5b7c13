"""The summary of many probes: measures by set, failures, tokens and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from forage_common.probe import metrics
from forage_common.v1.probe_pb2 import Probed
from forage_common.v1.trajectory_pb2 import Status


def is_finished(probed: Probed) -> bool:
    """Whether a probe needs no other attempt. One that failed for lack of a verdict may succeed another time."""
    return probed.status in (Status.STATUS_OK, Status.STATUS_INVALID_INPUT)


def count_computed_tokens(probed: Probed) -> int:
    """Tokens that the engine computed: of the contexts those that were not cached, and all that were generated."""
    return sum(p.context_tokens * p.samples - p.cached_tokens + p.generated_tokens for p in probed.points)


def summarise_probes(plan: Mapping[str, Any], probes: Sequence[Probed]) -> dict[str, Any]:
    """The content of summary.json."""
    failures = [probed for probed in probes if probed.status != Status.STATUS_OK]
    return {
        "plan": dict(plan),
        "probes": len(probes),
        "failed": len(failures),
        "failures": sorted({probed.status_detail for probed in failures})[:10],
        "sets": {name: dataclasses.asdict(measures) for name, measures in metrics.summarise(probes).items()},
        "computed_tokens": sum(map(count_computed_tokens, probes)),
        "cached_tokens": sum(point.cached_tokens for probed in probes for point in probed.points),
        "generated_tokens": sum(point.generated_tokens for probed in probes for point in probed.points),
        "seconds_per_probe": sum(probed.seconds for probed in probes) / len(probes) if probes else None,
    }
