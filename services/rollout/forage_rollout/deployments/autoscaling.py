"""How many engines and dispatchers there should be: Serve counts the calls that it carries, and their work is none."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from forage_runtime.settings import ReplicaSettings

ONGOING = "ongoing"
"""Statistic that a replica reports: an engine the requests in progress on its connections, a dispatcher its groups in
flight. Their limit follows the engines, so they are many where prompts wait and engines have room, and only then."""

FULL_SHARE = 0.75
"""Of the most that a replica ever has in progress: one that has as much is full. At a target that replicas cannot pass
there would never be another one."""


def find_target(replicas: ReplicaSettings, most: float) -> float:
    """Requests in progress per replica to aim at: what is set, or less where a replica has fewer.

    Args:
        most: requests that one replica ever has in progress.
    """
    return min(replicas.target_ongoing, FULL_SHARE * most)


def count_wanted(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Replicas for the work in progress, and no state. Serve's delays and limits apply to the result.

    Serve averages each replica's statistic over `look_back_period_s`, as it does with its own calls.
    """
    reported = (context.aggregated_metrics or {}).get(ONGOING, {})
    ongoing = sum(reported.values()) + context.total_num_requests
    return ongoing / context.config.get_target_ongoing_requests(), {}
