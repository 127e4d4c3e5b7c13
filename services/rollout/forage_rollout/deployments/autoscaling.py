"""How many engines and dispatchers there should be: Serve counts the calls that it carries, and their work is none."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

ONGOING = "ongoing"
"""Statistic that a replica reports: an engine the requests in progress on its connections, a dispatcher its groups in
flight. Their limit follows the engines, so they are many where prompts wait and engines have room, and only then."""

MOST_REQUESTS = 64.0
"""Requests in progress of an engine or an agent above which there should be another: half of the sequences that an
engine samples at once by default, where a further one still makes all of them faster."""

MOST_GROUPS = 256.0
"""Groups in flight of a dispatcher above which there should be another: the default of their limit, which only engines
with room for so many reach. One dispatcher carries that on one core."""

UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 10.0, 300.0
"""How long more, or fewer, replicas must be wanted. Starting an engine costs minutes, and validations and updates of
weights leave engines idle for less than the longer one: what comes back soon is not removed."""

FULL_SHARE = 0.75
"""Of the most that a replica ever has in progress: one that has as much is full. At a target that replicas cannot pass
there would never be another one."""


def find_target(ongoing: float, most: float) -> float:
    """Requests in progress per replica to aim at: `ongoing`, or less where a replica has fewer.

    Args:
        most: requests that one replica ever has in progress.
    """
    return min(ongoing, FULL_SHARE * most)


def count_wanted(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Replicas for the work in progress, and no state. Serve's delays and limits apply to the result.

    Serve averages each replica's statistic over `look_back_period_s`, as it does with its own calls.
    """
    reported = (context.aggregated_metrics or {}).get(ONGOING, {})
    ongoing = sum(reported.values()) + context.total_num_requests
    return ongoing / context.config.get_target_ongoing_requests(), {}
