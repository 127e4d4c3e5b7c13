"""The reward dashboard: throughput, scores, failures, and signs of reward hacking."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, DashboardBuilder, Query, Step
from forage_dashboards.queries import INSTANCE as S
from forage_dashboards.queries import compute_ratio

_ITEMS = "forage_reward_items_total"
_INFRASTRUCTURE = 'status=~"timeout|internal"'
_FAILED = compute_ratio(f"{S.compute_rate(_ITEMS, where=_INFRASTRUCTURE)} or vector(0)", S.compute_rate(_ITEMS))


def build_dashboard() -> Dashboard:
    """Build the dashboard of the reward service."""
    board = DashboardBuilder(
        "reward", "Reward", "Scores: throughput, latency, failures, and signs of reward hacking.", job="reward"
    )
    board.add_stat("Scored", "Trajectories per second.", "suffix: /s", S.compute_rate(_ITEMS), base=NEUTRAL)
    board.add_stat(
        "Infrastructure failures",
        "Share of trajectories with a timeout or an error of a reward instead of a score; they are excluded from the "
        "loss.",
        "percentunit",
        _FAILED,
        Step(0.005, YELLOW),
        Step(0.02, RED),
    )
    board.add_stat(
        "Latency, p99",
        "99 % of batches are scored within this time.",
        "s",
        S.compute_quantile(0.99, "forage_reward_request_seconds"),
        Step(1, YELLOW),
        Step(5, RED),
    )
    board.add_stat(
        "Queue",
        "Trajectories queued or being scored.",
        "none",
        S.aggregate("forage_reward_queue_items", how="sum"),
        base=NEUTRAL,
    )
    board.add_stat(
        "Refused",
        "Calls per second refused by a full queue; clients retry them.",
        "cps",
        f"{S.compute_rate('forage_reward_refused_total')} or vector(0)",
        Step(0.01, YELLOW),
    )
    board.add_stat(
        "Canaries",
        "Share of trajectories with a pattern that suggests reward hacking, above all where it rises with the reward.",
        "percentunit",
        compute_ratio(S.compute_rate("forage_reward_canaries_total"), S.compute_rate(_ITEMS)),
        Step(0.1, YELLOW),
        Step(0.5, RED),
    )

    board.add_row("Scores")
    board.add_timeseries(
        "Mean reward",
        "Mean reward by data source, of training and validation together.",
        "none",
        Query(
            S.compute_mean("forage_reward_score", by="data_source", where='component="total"'),
            "{{data_source}}",
        ),
    )
    board.add_timeseries(
        "Components",
        "Mean raw value of each component.",
        "none",
        Query(S.compute_mean("forage_reward_score", by="reward, component"), "{{reward}}: {{component}}"),
    )
    board.add_heatmap(
        "Distribution of rewards",
        "Trajectories per second by reward.",
        "none",
        S.compute_rate("forage_reward_score_bucket", by="le", where='component="total"'),
    )

    board.add_row("Service")
    board.add_timeseries(
        "Trajectories by status",
        "Trajectories per second. ok and abstain have a score; invalid_input comes from the data, timeout and internal "
        "from the system.",
        "suffix: /s",
        Query(S.compute_rate(_ITEMS, by="status"), "{{status}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Latency",
        "Time to score the batch of a call, by quantile.",
        "s",
        *(Query(S.compute_quantile(q, "forage_reward_request_seconds"), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)),
        minimum=0,
    )
    board.add_timeseries(
        "Calls",
        "Calls per second by method.",
        "reqps",
        Query(S.compute_rate("forage_reward_requests_total", by="method"), "{{method}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Queue",
        "Trajectories queued or being scored, by instance.",
        "none",
        Query(S.aggregate("forage_reward_queue_items", by="instance", how="sum"), "{{instance}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Reward errors",
        "Per second, by reward: an exception in its code, or a score that is not finite. See the service's log.",
        "cps",
        Query(S.compute_rate("forage_reward_failures_total", by="reward"), "{{reward}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Restarts",
        "Restarts in the selected time range: workers, processes of user rewards, shadow processes.",
        "none",
        Query(f"{S.compute_increase('forage_reward_worker_restarts_total')} or vector(0)", "workers"),
        Query(f"{S.compute_increase('forage_reward_user_restarts_total')} or vector(0)", "user rewards"),
        Query(f"{S.compute_increase('forage_reward_shadow_restarts_total')} or vector(0)", "shadow"),
        minimum=0,
    )

    board.add_row("Reward hacking and shadows")
    board.add_timeseries(
        "Canaries",
        "Trajectories per second by pattern.",
        "cps",
        Query(S.compute_rate("forage_reward_canaries_total", by="canary"), "{{canary}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Judge model",
        "Calls per second by outcome, and verdicts from the cache. Empty without a reward that uses a judge model.",
        "cps",
        Query(S.compute_rate("forage_reward_judge_calls_total", by="outcome"), "{{outcome}}"),
        Query(S.compute_rate("forage_reward_judge_cached_total"), "cached"),
        minimum=0,
    )
    board.add_timeseries(
        "Shadow rewards",
        "Trajectories per second: scored by a shadow, with a score that differs from the live score, and dropped by a "
        "full queue. Empty without a shadow.",
        "cps",
        Query(S.compute_rate("forage_reward_shadow_items_total"), "scored"),
        Query(S.compute_rate("forage_reward_shadow_disagreements_total"), "differ"),
        Query(S.compute_rate("forage_reward_shadow_dropped_total"), "dropped"),
        minimum=0,
    )
    return board.build()
