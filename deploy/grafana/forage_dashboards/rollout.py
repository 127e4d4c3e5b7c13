"""Rollout: engines, what trajectories do, weights, and the groups of the dispatchers."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, Board, Query, Step
from forage_dashboards.queries import INSTANCE as S
from forage_dashboards.queries import share

_TRAJECTORIES = S.rate("forage_rollout_trajectories_total")
_FAILED = share(S.rate("forage_rollout_failed_trajectories_total"), _TRAJECTORIES)
_ENGINES = S.gauge("forage_rollout_replicas", where='deployment="Engine"', how="sum")


def _each(count: str) -> str:
    """Of a count, how much there is for each trajectory."""
    return share(S.rate(f"forage_rollout_{count}_total"), _TRAJECTORIES)


def _now(gauge: str) -> str:
    return S.gauge(f"forage_rollout_{gauge}", how="sum")


def dashboard() -> Dashboard:
    """The page for who runs the engines."""
    board = Board("rollout", "Rollout", "Engines and agents: how fast, how full, how fresh.", job="rollout")
    board.value("Engines", "Replicas that answer.", "none", _ENGINES, Step(1, "green"), base=RED)
    board.value(
        "Out of service",
        "Engines that do not serve because they could not load the announced policy.",
        "none",
        _now("out_of_service"),
        Step(1, RED),
    )
    board.value(
        "Tokens sampled",
        "A second, all engines together.",
        "suffix: tokens/s",
        S.rate("forage_rollout_sampled_tokens_total"),
        base=NEUTRAL,
    )
    board.value(
        "Requests waiting",
        "Generations that wait within the engines: more than run means that engines are the bottleneck.",
        "none",
        _now("requests_waiting"),
        base=NEUTRAL,
    )
    board.value(
        "Engines busy",
        "Share of their time with at least one request.",
        "percentunit",
        f"clamp_max({S.rate('forage_rollout_busy_seconds_total')} / ({_ENGINES} > 0), 1)",
        base=NEUTRAL,
    )
    board.value(
        "Failed trajectories",
        "Share without a valid result: they are in no loss.",
        "percentunit",
        _FAILED,
        Step(0.05, YELLOW),
        Step(0.2, RED),
    )

    board.row("Engine")
    board.lines(
        "Tokens",
        "A second: sampled, and prompt tokens that came in, of which some are in the prefix cache.",
        "suffix: tokens/s",
        Query(S.rate("forage_rollout_sampled_tokens_total"), "sampled"),
        Query(S.rate("forage_rollout_prompt_tokens_total"), "prompt"),
        Query(S.rate("forage_rollout_cached_prompt_tokens_total"), "prompt, cached"),
        least=0,
    )
    board.lines(
        "Requests",
        "Generations in the engines.",
        "none",
        Query(_now("requests_running"), "running"),
        Query(_now("requests_waiting"), "waiting"),
        Query(_now("samples_in_flight"), "trajectories in flight"),
        least=0,
    )
    board.lines(
        "Prefix cache",
        "Share of prompt tokens found in it. It is emptied with every new policy.",
        "percentunit",
        Query(
            share(S.rate("forage_rollout_cached_prompt_tokens_total"), S.rate("forage_rollout_prompt_tokens_total")),
            "hits",
        ),
        least=0,
        most=1,
    )

    board.row("Trajectories")
    board.lines(
        "Where their time goes",
        "Mean seconds of a trajectory: waiting before its start, in the engine, in the environment (search), in the "
        "reward.",
        "s",
        Query(_each("wait_seconds"), "wait"),
        Query(_each("generate_seconds"), "engine"),
        Query(_each("retrieve_seconds"), "environment"),
        Query(_each("score_seconds"), "reward"),
        stacked=True,
        least=0,
    )
    board.lines(
        "Turns, searches, invalid actions",
        "Means of a trajectory.",
        "none",
        Query(_each("turns"), "turns"),
        Query(_each("searches"), "searches"),
        Query(_each("invalid_actions"), "invalid actions"),
        least=0,
    )
    board.lines(
        "How they end",
        "Shares of trajectories: cut at a limit, without an answer, failed.",
        "percentunit",
        Query(_each("truncated_trajectories"), "cut"),
        Query(_each("unfinished_trajectories"), "no answer"),
        Query(_FAILED, "failed"),
        least=0,
    )
    board.lines(
        "Failures by kind",
        "Failed trajectories a second. Timeouts are too much load or a service that is away, invalid input is the "
        "data, internal and environment are errors in code: see the logs.",
        "cps",
        *(
            Query(S.rate(f"forage_rollout_{name}_total"), legend)
            for name, legend in (
                ("failed_timeout", "timeout"),
                ("failed_invalid_input", "invalid input"),
                ("failed_internal", "internal"),
                ("environment_failures", "environment"),
            )
        ),
        least=0,
    )
    board.lines(
        "Calls of services",
        "A second: attempts that were repeated, calls given up, and circuits that opened.",
        "cps",
        Query(S.rate("forage_rollout_call_retries_total", by="service"), "{{service}}: repeated"),
        Query(S.rate("forage_rollout_calls_given_up_total", by="service"), "{{service}}: given up"),
        Query(S.rate("forage_rollout_circuits_opened_total", by="service"), "{{service}}: circuit opened"),
        least=0,
    )
    board.lines(
        "Circuits open",
        "Processes that leave a service alone for a moment, for it kept failing.",
        "none",
        Query(S.gauge("forage_rollout_circuit_open", by="service", how="sum"), "{{service}}"),
        least=0,
    )

    board.row("Weights")
    board.lines(
        "Version that each engine serves",
        "All should follow the announced one within seconds.",
        "none",
        Query(S.gauge("forage_rollout_policy_announced_version"), "announced"),
        Query(S.gauge("forage_rollout_replica_policy_version", by="replica"), "{{replica}}"),
    )
    board.lines(
        "Updates",
        "In the time shown: policies and adapters loaded, and policies that could not be.",
        "none",
        Query(S.grown("forage_rollout_policy_updates_total"), "policies"),
        Query(S.grown("forage_rollout_adapter_loads_total"), "adapters"),
        Query(S.grown("forage_rollout_policy_failures_total"), "failures"),
        least=0,
    )
    board.lines(
        "Standstill",
        "Share of the engines' time in which generation stood still for new weights, and engines that stand still now.",
        "percentunit",
        Query(f"{S.rate('forage_rollout_policy_pause_seconds_total')} / ({_ENGINES} > 0)", "for weights"),
        Query(f"{_now('paused')} / ({_ENGINES} > 0)", "paused now"),
        least=0,
    )
    board.heat(
        "Staleness of tokens",
        "Sampled tokens a second, by the versions that their policy was behind the announced one when their group "
        "ended.",
        "none",
        S.rate("forage_rollout_token_staleness_bucket", by="le"),
    )

    board.row("Groups")
    board.lines(
        "Groups done",
        "A second.",
        "suffix: groups/s",
        Query(S.rate("forage_rollout_groups_done_total"), "done"),
        least=0,
    )
    board.lines(
        "In flight",
        "Groups and trajectories being worked on.",
        "none",
        Query(_now("groups_in_flight"), "groups"),
        Query(_now("samples_in_flight"), "trajectories"),
        least=0,
    )
    board.lines(
        "Repairs",
        "In the time shown: taken over, left to another worker, run again, done twice, given up; and dispatchers that "
        "began anew.",
        "none",
        *(
            Query(S.grown(f"forage_rollout_{name}_total"), legend)
            for name, legend in (
                ("groups_reclaimed", "reclaimed"),
                ("groups_released", "released"),
                ("runs_repeated", "run again"),
                ("groups_duplicated", "done twice"),
                ("groups_failed", "given up"),
                ("restarts", "dispatcher restarts"),
            )
        ),
        least=0,
    )
    board.lines(
        "Held back",
        "Share of time without new prompts because the trainer has not read what was written.",
        "percentunit",
        Query(S.rate("forage_rollout_backpressure_seconds_total"), "held back"),
        least=0,
    )
    board.lines(
        "Replicas",
        "Processes of each deployment that answer.",
        "none",
        Query(S.gauge("forage_rollout_replicas", by="deployment", how="sum"), "{{deployment}}"),
        least=0,
    )
    return board.build()
