"""Reward: how much is scored, what came out, what failed, and what looks like a trick."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, Board, Query, Step
from forage_dashboards.queries import INSTANCE as S
from forage_dashboards.queries import share

_ITEMS = "forage_reward_items_total"
_OURS = 'status=~"timeout|internal"'
_FAILED = share(f"{S.rate(_ITEMS, where=_OURS)} or vector(0)", S.rate(_ITEMS))


def dashboard() -> Dashboard:
    """The page for who writes rewards."""
    board = Board("reward", "Reward", "Scores: how many, how fast, and whether they can be believed.", job="reward")
    board.value("Scored", "Trajectories a second.", "suffix: /s", S.rate(_ITEMS), base=NEUTRAL)
    board.value(
        "Our failures",
        "Share of trajectories that got a timeout or an error of a reward instead of a score: they are in no loss.",
        "percentunit",
        _FAILED,
        Step(0.005, YELLOW),
        Step(0.02, RED),
    )
    board.value(
        "Latency, p99",
        "One batch of a hundred takes longer.",
        "s",
        S.quantile(0.99, "forage_reward_request_seconds"),
        Step(1, YELLOW),
        Step(5, RED),
    )
    board.value(
        "In hand", "Trajectories being scored.", "none", S.gauge("forage_reward_queue_items", how="sum"), base=NEUTRAL
    )
    board.value(
        "Refused",
        "Calls a second that found the queue full; clients repeat them.",
        "cps",
        f"{S.rate('forage_reward_refused_total')} or vector(0)",
        Step(0.01, YELLOW),
    )
    board.value(
        "Canaries",
        "Share of trajectories with a pattern that suggests a reward obtained by a trick. A rise with the reward is "
        "what reward hacking looks like.",
        "percentunit",
        share(S.rate("forage_reward_canaries_total"), S.rate(_ITEMS)),
        Step(0.1, YELLOW),
        Step(0.5, RED),
    )

    board.row("Scores")
    board.lines(
        "Mean reward",
        "Of what was scored, by data source; training and validation together.",
        "none",
        Query(
            S.mean("forage_reward_score", by="data_source", where='component="total"'),
            "{{data_source}}",
        ),
    )
    board.lines(
        "Components",
        "Mean raw value of each part of a reward.",
        "none",
        Query(S.mean("forage_reward_score", by="reward, component"), "{{reward}}: {{component}}"),
    )
    board.heat(
        "Rewards, all",
        "Trajectories a second by their reward.",
        "none",
        S.rate("forage_reward_score_bucket", by="le", where='component="total"'),
    )

    board.row("Service")
    board.lines(
        "Trajectories by status",
        "A second. ok and abstain are scores; invalid_input is the data's fault, timeout and internal are ours.",
        "suffix: /s",
        Query(S.rate(_ITEMS, by="status"), "{{status}}"),
        least=0,
    )
    board.lines(
        "Latency",
        "Time to score the batch of a call.",
        "s",
        *(Query(S.quantile(q, "forage_reward_request_seconds"), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)),
        least=0,
    )
    board.lines(
        "Calls",
        "A second, by method.",
        "reqps",
        Query(S.rate("forage_reward_requests_total", by="method"), "{{method}}"),
        least=0,
    )
    board.lines(
        "In hand",
        "Trajectories being scored, by instance.",
        "none",
        Query(S.gauge("forage_reward_queue_items", by="instance", how="sum"), "{{instance}}"),
        least=0,
    )
    board.lines(
        "Rewards that raised",
        "A second, by reward: an error in its code, or a score that is no finite number. See the service's log.",
        "cps",
        Query(S.rate("forage_reward_failures_total", by="reward"), "{{reward}}"),
        least=0,
    )
    board.lines(
        "Restarts",
        "In the time shown: workers, processes of user rewards, and shadows that ended and were started again.",
        "none",
        Query(f"{S.grown('forage_reward_worker_restarts_total')} or vector(0)", "workers"),
        Query(f"{S.grown('forage_reward_user_restarts_total')} or vector(0)", "user rewards"),
        Query(f"{S.grown('forage_reward_shadow_restarts_total')} or vector(0)", "shadow"),
        least=0,
    )

    board.row("Trust")
    board.lines(
        "Canaries",
        "A second, by pattern.",
        "cps",
        Query(S.rate("forage_reward_canaries_total", by="canary"), "{{canary}}"),
        least=0,
    )
    board.lines(
        "Judging model",
        "Calls a second by outcome, and verdicts that were known already. Only rewards with a judge have any.",
        "cps",
        Query(S.rate("forage_reward_judge_calls_total", by="outcome"), "{{outcome}}"),
        Query(S.rate("forage_reward_judge_cached_total"), "known"),
        least=0,
    )
    board.lines(
        "Shadow rewards",
        "A second, where a shadow is set: trajectories that it scored, those whose score differs from the live, and "
        "those for which it had no room.",
        "cps",
        Query(S.rate("forage_reward_shadow_items_total"), "scored"),
        Query(S.rate("forage_reward_shadow_disagreements_total"), "differ"),
        Query(S.rate("forage_reward_shadow_dropped_total"), "no room"),
        least=0,
    )
    return board.build()
