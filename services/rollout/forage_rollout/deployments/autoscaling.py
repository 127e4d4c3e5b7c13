"""How many engine replicas there should be: Serve counts the calls that it carries, and no generation is one."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

GENERATIONS = "generations"
"""Statistic that a replica reports: requests in progress on its connections."""


def count_wanted(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Replicas for the requests in progress, and no state. Serve's delays and limits apply to the result.

    Serve averages each replica's statistic over `look_back_period_s`, as it does with its own calls.
    """
    generations = (context.aggregated_metrics or {}).get(GENERATIONS, {})
    ongoing = sum(generations.values()) + context.total_num_requests
    return ongoing / context.config.get_target_ongoing_requests(), {}
