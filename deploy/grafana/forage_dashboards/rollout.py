"""The rollout dashboard: engines, trajectories, weights, and the groups of the dispatchers."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, DashboardBuilder, Query, Step
from forage_dashboards.queries import INSTANCE as S
from forage_dashboards.queries import compute_ratio

_TRAJECTORIES = S.compute_rate("forage_rollout_trajectories_total")
_FAILED = compute_ratio(S.compute_rate("forage_rollout_failed_trajectories_total"), _TRAJECTORIES)
_ENGINES = S.aggregate("forage_rollout_replicas", where='deployment="Engine"', how="sum")


def _per_trajectory(count: str) -> str:
    """Compute the mean of a counter per trajectory."""
    return compute_ratio(S.compute_rate(f"forage_rollout_{count}_total"), _TRAJECTORIES)


def _sum_gauge(gauge: str) -> str:
    return S.aggregate(f"forage_rollout_{gauge}", how="sum")


def build_dashboard() -> Dashboard:
    """Build the dashboard of engines and agents."""
    board = DashboardBuilder(
        "rollout", "Rollout", "Engines and agents: throughput, load, policy versions.", job="rollout"
    )
    board.add_stat("Engines", "Replicas that respond.", "none", _ENGINES, Step(1, "green"), base=RED)
    board.add_stat(
        "Out of service",
        "Engines out of service because they could not load the announced policy.",
        "none",
        _sum_gauge("out_of_service"),
        Step(1, RED),
    )
    board.add_stat(
        "Tokens sampled",
        "Tokens per second of all engines.",
        "suffix: tokens/s",
        S.compute_rate("forage_rollout_sampled_tokens_total"),
        base=NEUTRAL,
    )
    board.add_stat(
        "Requests waiting",
        "Requests that wait within the engines. More waiting than running: the engines are the bottleneck.",
        "none",
        _sum_gauge("requests_waiting"),
        base=NEUTRAL,
    )
    board.add_stat(
        "Engines busy",
        "Share of time with at least one request.",
        "percentunit",
        f"clamp_max({S.compute_rate('forage_rollout_busy_seconds_total')} / ({_ENGINES} > 0), 1)",
        base=NEUTRAL,
    )
    board.add_stat(
        "Failed trajectories",
        "Share of trajectories without a valid result; they are excluded from the loss.",
        "percentunit",
        _FAILED,
        Step(0.05, YELLOW),
        Step(0.2, RED),
    )

    board.add_row("Engine")
    board.add_timeseries(
        "Tokens",
        "Tokens per second: sampled, in prompts, and in prompts found in the prefix cache.",
        "suffix: tokens/s",
        Query(S.compute_rate("forage_rollout_sampled_tokens_total"), "sampled"),
        Query(S.compute_rate("forage_rollout_prompt_tokens_total"), "prompt"),
        Query(S.compute_rate("forage_rollout_cached_prompt_tokens_total"), "prompt, cached"),
        minimum=0,
    )
    board.add_timeseries(
        "Requests",
        "Requests in the engines, and trajectories in flight.",
        "none",
        Query(_sum_gauge("requests_running"), "running"),
        Query(_sum_gauge("requests_waiting"), "waiting"),
        Query(_sum_gauge("samples_in_flight"), "trajectories in flight"),
        minimum=0,
    )
    board.add_timeseries(
        "Limit of groups",
        "Groups in flight, the most that dispatchers have in flight, which follows the engines, and sequences a minute "
        "that engines evicted.",
        "none",
        Query(_sum_gauge("groups_in_flight"), "in flight"),
        Query(_sum_gauge("groups_limit"), "limit"),
        Query(f"60 * {S.compute_rate('forage_rollout_evictions_total')}", "evictions a minute"),
        minimum=0,
    )
    board.add_timeseries(
        "KV cache",
        "Share of the engines' caches that running sequences hold.",
        "percentunit",
        Query(compute_ratio(_sum_gauge("cache_tokens_used"), _sum_gauge("cache_tokens")), "used"),
        minimum=0,
        maximum=1,
    )
    board.add_timeseries(
        "Late event loops",
        "How late processes run what is due, mean by deployment. More than a tenth of a second: too few agents or "
        "dispatchers.",
        "s",
        Query(
            f"{S.compute_rate('forage_rollout_loop_late_seconds_total', by='deployment')}"
            f" / ({S.compute_rate('forage_rollout_loop_looks_total', by='deployment')} > 0)",
            "{{deployment}}",
        ),
        minimum=0,
    )
    board.add_timeseries(
        "Prefix cache",
        "Share of prompt tokens found in the prefix cache, which every new policy resets.",
        "percentunit",
        Query(
            compute_ratio(
                S.compute_rate("forage_rollout_cached_prompt_tokens_total"),
                S.compute_rate("forage_rollout_prompt_tokens_total"),
            ),
            "hits",
        ),
        minimum=0,
        maximum=1,
    )

    board.add_row("Trajectories")
    board.add_timeseries(
        "Time of a trajectory",
        "Mean seconds per trajectory: queued, in the engine, in the environment (search), in the reward.",
        "s",
        Query(_per_trajectory("wait_seconds"), "queued"),
        Query(_per_trajectory("generate_seconds"), "engine"),
        Query(_per_trajectory("retrieve_seconds"), "environment"),
        Query(_per_trajectory("score_seconds"), "reward"),
        stacked=True,
        minimum=0,
    )
    board.add_timeseries(
        "Turns, searches, invalid actions",
        "Means per trajectory.",
        "none",
        Query(_per_trajectory("turns"), "turns"),
        Query(_per_trajectory("searches"), "searches"),
        Query(_per_trajectory("invalid_actions"), "invalid actions"),
        minimum=0,
    )
    board.add_timeseries(
        "Outcomes",
        "Shares of trajectories: truncated, without an answer, failed.",
        "percentunit",
        Query(_per_trajectory("truncated_trajectories"), "truncated"),
        Query(_per_trajectory("unfinished_trajectories"), "no answer"),
        Query(_FAILED, "failed"),
        minimum=0,
    )
    board.add_timeseries(
        "Failures by kind",
        "Failed trajectories per second. Timeouts come from overload or an unavailable service, invalid input from the "
        "data, internal and environment failures from errors in code: see the logs.",
        "cps",
        *(
            Query(S.compute_rate(f"forage_rollout_{name}_total"), legend)
            for name, legend in (
                ("failed_timeout", "timeout"),
                ("failed_invalid_input", "invalid input"),
                ("failed_internal", "internal"),
                ("environment_failures", "environment"),
            )
        ),
        minimum=0,
    )
    board.add_timeseries(
        "Calls of services",
        "Per second: retries, calls given up, and circuit breakers opened.",
        "cps",
        Query(S.compute_rate("forage_rollout_call_retries_total", by="service"), "{{service}}: retries"),
        Query(S.compute_rate("forage_rollout_calls_given_up_total", by="service"), "{{service}}: given up"),
        Query(S.compute_rate("forage_rollout_circuits_opened_total", by="service"), "{{service}}: circuit opened"),
        minimum=0,
    )
    board.add_timeseries(
        "Open circuit breakers",
        "Processes that pause calls to a service after repeated failures.",
        "none",
        Query(S.aggregate("forage_rollout_circuit_open", by="service", how="sum"), "{{service}}"),
        minimum=0,
    )

    board.add_row("Weights")
    board.add_timeseries(
        "Policy versions",
        "Announced version and version served by each engine, which should follow within seconds.",
        "none",
        Query(S.aggregate("forage_rollout_policy_announced_version"), "announced"),
        Query(S.aggregate("forage_rollout_replica_policy_version", by="replica"), "{{replica}}"),
    )
    board.add_timeseries(
        "Difference from the trainer",
        "Mean difference between log-probabilities of trainer and engine, of a few tokens under the served policy.",
        "none",
        Query(S.aggregate("forage_rollout_replica_canary_difference", by="replica"), "{{replica}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Updates",
        "In the selected time range: policies and adapters loaded, and policies that could not be loaded.",
        "none",
        Query(S.compute_increase("forage_rollout_policy_updates_total"), "policies"),
        Query(S.compute_increase("forage_rollout_adapter_loads_total"), "adapters"),
        Query(S.compute_increase("forage_rollout_direct_transfers_total"), "sent by the trainer"),
        Query(S.compute_increase("forage_rollout_direct_fallbacks_total"), "read instead"),
        Query(S.compute_increase("forage_rollout_fresh_loads_total"), "afresh"),
        Query(S.compute_increase("forage_rollout_policy_failures_total"), "failures"),
        minimum=0,
    )
    board.add_timeseries(
        "Generation pause",
        "Share of the engines' time in which generation was paused for new weights, and share of engines paused now.",
        "percentunit",
        Query(
            f"{S.compute_rate('forage_rollout_policy_pause_seconds_total')} / ({_ENGINES} > 0)", "paused for weights"
        ),
        Query(f"{_sum_gauge('paused')} / ({_ENGINES} > 0)", "paused now"),
        minimum=0,
    )
    board.add_heatmap(
        "Staleness of tokens",
        "Sampled tokens per second by the number of versions behind the announced policy when their group finished.",
        "none",
        S.compute_rate("forage_rollout_token_staleness_bucket", by="le"),
    )

    board.add_row("Groups")
    board.add_timeseries(
        "Groups finished",
        "Groups per second.",
        "suffix: groups/s",
        Query(S.compute_rate("forage_rollout_groups_done_total"), "finished"),
        minimum=0,
    )
    board.add_timeseries(
        "In flight",
        "Groups and trajectories in flight.",
        "none",
        Query(_sum_gauge("groups_in_flight"), "groups"),
        Query(_sum_gauge("samples_in_flight"), "trajectories"),
        minimum=0,
    )
    board.add_timeseries(
        "Repeated work",
        "In the selected time range: groups reclaimed from a dead worker, released to another one, run again, finished "
        "twice, given up; generations asked again because their engine died; restarts of dispatchers.",
        "none",
        *(
            Query(S.compute_increase(f"forage_rollout_{name}_total"), legend)
            for name, legend in (
                ("groups_reclaimed", "reclaimed"),
                ("groups_released", "released"),
                ("runs_repeated", "run again"),
                ("groups_duplicated", "finished twice"),
                ("groups_failed", "given up"),
                ("generations_repeated", "generations again"),
                ("restarts", "dispatcher restarts"),
            )
        ),
        minimum=0,
    )
    board.add_timeseries(
        "Backpressure",
        "Share of time in which no prompts are claimed because the trajectory stream is full.",
        "percentunit",
        Query(S.compute_rate("forage_rollout_backpressure_seconds_total"), "backpressure"),
        minimum=0,
    )
    board.add_timeseries(
        "Replicas",
        "Replicas of each deployment that respond.",
        "none",
        Query(S.aggregate("forage_rollout_replicas", by="deployment", how="sum"), "{{deployment}}"),
        minimum=0,
    )
    return board.build()
