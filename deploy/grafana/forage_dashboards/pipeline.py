"""Pipeline: who waits for whom, how fast work flows, how fresh it is, and what is lost on the way."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, Board, Query, Step
from forage_dashboards.queries import RELEASE as S
from forage_dashboards.queries import share

_WAITING = f"clamp_max({S.rate('forage_trainer_wait_seconds_total')}, 1)"
_ENGINES = S.gauge("forage_rollout_replicas", where='deployment="Engine"', how="sum")
_IDLE = f"1 - clamp_max({S.rate('forage_rollout_busy_seconds_total')} / ({_ENGINES} > 0), 1)"
# Each pod of the rollout tells the same of the streams.
_PROMPTS = S.gauge("forage_rollout_prompts_on_stream")
_IN_FLIGHT = S.gauge("forage_rollout_groups_in_flight", how="sum")


def dashboard() -> Dashboard:
    """The page to open first."""
    board = Board("pipeline", "Pipeline", "Is work flowing? Trainer, rollout and the streams between them.")
    board.value(
        "Alerts",
        "Forage's alerts that fire now. 0 as well where Prometheus does not have the rules.",
        "none",
        'count(ALERTS{alertname=~"Forage.*", alertstate="firing", namespace=~"$namespace"}) or vector(0)',
        Step(1, RED),
    )
    board.value(
        "Not ready",
        "What services wait for before they can do their work; each says more under /readyz.",
        "none",
        f"{S.gauge('forage_common_waiting', how='sum')} or vector(0)",
        Step(1, YELLOW),
    )
    board.value(
        "Trainer waits",
        "Share of its time that the trainer waits for groups. Near 1: the rollout side is the slower one.",
        "percentunit",
        _WAITING,
        Step(0.5, YELLOW),
        Step(0.8, RED),
    )
    board.value(
        "Engines idle",
        "Share of their time that engines have nothing to do. High while the trainer computes: raise max_staleness.",
        "percentunit",
        _IDLE,
        Step(0.5, YELLOW),
        Step(0.8, RED),
    )
    board.value(
        "Prompts waiting",
        "Prompts on the stream that no worker has taken.",
        "none",
        f"clamp_min({_PROMPTS} - {_IN_FLIGHT}, 0)",
        base=NEUTRAL,
    )
    board.value(
        "Staleness",
        "Versions between sampling and training, the highest of the last step, as a share of what is allowed; at 1 "
        "groups are close to being dropped.",
        "percentunit",
        f"{S.gauge('forage_trainer_staleness_max')} / clamp_min({S.gauge('forage_trainer_max_staleness')}, 1)",
        base=NEUTRAL,
    )

    board.row("Who waits for whom")
    board.lines(
        "Starvation",
        "Shares of time: the trainer waits for groups, engines have nothing to do, or the rollout takes no prompts "
        "because the trainer has not read what it wrote. One of the first two is normal; both at once means that "
        "something between them is slow.",
        "percentunit",
        Query(_WAITING, "trainer waits"),
        Query(_IDLE, "engines idle"),
        Query(f"clamp_max({S.rate('forage_rollout_backpressure_seconds_total')}, 1)", "held back"),
        least=0,
        most=1,
    )
    board.lines(
        "Queues",
        "Prompts on their stream, groups being worked on, and groups that wait for the trainer or its checkpoint.",
        "none",
        Query(_PROMPTS, "prompts on stream"),
        Query(_IN_FLIGHT, "groups in flight"),
        Query(S.gauge("forage_rollout_trajectories_on_stream"), "groups on stream"),
        least=0,
    )
    board.lines(
        "Trainer's time",
        "Where a step's time goes.",
        "s",
        Query(S.gauge("forage_trainer_phase_seconds", by="phase", where='phase!="total"'), "{{phase}}"),
        stacked=True,
        least=0,
    )

    board.row("Throughput")
    board.lines(
        "Groups",
        "A second: issued by the trainer and done by the rollout; validation included.",
        "suffix: groups/s",
        Query(S.rate("forage_trainer_prompts_issued_total"), "issued"),
        Query(S.rate("forage_rollout_groups_done_total"), "done"),
        least=0,
    )
    board.lines(
        "Tokens",
        "A second: sampled by engines, in trajectories that ended, and trained on (whole trajectories, prompts "
        "included).",
        "suffix: tokens/s",
        Query(S.rate("forage_rollout_sampled_tokens_total"), "sampled"),
        Query(S.rate("forage_rollout_generated_tokens_total"), "in trajectories"),
        Query(S.rate("forage_trainer_tokens_total"), "trained on"),
        least=0,
    )
    board.lines(
        "Trajectories",
        "A second: ended and, of those, failed; trained on, and those among them that were failed.",
        "suffix: /s",
        Query(S.rate("forage_rollout_trajectories_total"), "ended"),
        Query(S.rate("forage_rollout_failed_trajectories_total"), "failed"),
        Query(S.rate("forage_trainer_trajectories_total", by="outcome"), "trainer: {{outcome}}"),
        least=0,
    )

    board.row("Freshness")
    board.lines(
        "Staleness",
        "Versions between sampling and training, of a step's trajectories, and how many are allowed.",
        "none",
        Query(S.gauge("forage_trainer_staleness_mean"), "mean"),
        Query(S.gauge("forage_trainer_staleness_max"), "highest"),
        Query(S.gauge("forage_trainer_max_staleness"), "allowed"),
        least=0,
    )
    board.lines(
        "Policy versions",
        "What the trainer has announced and what each engine serves. A line that stays behind is an engine that cannot "
        "load.",
        "none",
        Query(S.gauge("forage_rollout_policy_announced_version"), "announced"),
        Query(S.gauge("forage_rollout_replica_policy_version", by="replica"), "{{replica}}"),
    )
    board.lines(
        "Publishing",
        "Time to write and announce the last policy, and the time of each update that engines stood still for it.",
        "s",
        Query(S.gauge("forage_trainer_publish_seconds"), "write and announce"),
        Query(
            share(
                S.rate("forage_rollout_policy_pause_seconds_total"),
                S.rate("forage_rollout_policy_updates_total"),
            ),
            "pause of an update",
        ),
        least=0,
    )

    board.row("Losses and repairs")
    board.lines(
        "Groups not trained on",
        "In the time shown, by reason. Stale ones are issued again; duplicates are the price of exactly once.",
        "none",
        Query(S.grown("forage_trainer_groups_dropped_total", by="reason"), "{{reason}}"),
        least=0,
    )
    board.lines(
        "Groups that took a detour",
        "In the time shown: taken over from a worker that fell silent, left to another, run again, done twice, given "
        "up.",
        "none",
        *(
            Query(S.grown(f"forage_rollout_{name}_total"), legend)
            for name, legend in (
                ("groups_reclaimed", "reclaimed"),
                ("groups_released", "released"),
                ("runs_repeated", "run again"),
                ("groups_duplicated", "done twice"),
                ("groups_failed", "given up"),
            )
        ),
        least=0,
    )
    board.lines(
        "Redis away",
        "Calls a second that found Redis away and are repeated.",
        "cps",
        Query(S.rate("forage_trainer_redis_waits_total"), "trainer"),
        Query(S.rate("forage_rollout_redis_waits_total"), "rollout"),
        least=0,
    )
    board.lines(
        "Calls that failed",
        "A second, by the service that was called: repeated, and given up for good (the trajectory fails).",
        "cps",
        Query(S.rate("forage_rollout_call_retries_total", by="service"), "{{service}}: repeated"),
        Query(S.rate("forage_rollout_calls_given_up_total", by="service"), "{{service}}: given up"),
        least=0,
    )
    board.lines(
        "Phase of the trainer",
        "1 for what it is doing.",
        "none",
        Query(S.gauge("forage_trainer_phase", by="phase"), "{{phase}}"),
        least=0,
        most=1,
        stacked=True,
    )
    board.lines(
        "Share of failed trajectories",
        "Trajectories without a valid score, whatever the reason: they are in no loss.",
        "percentunit",
        Query(
            share(S.rate("forage_rollout_failed_trajectories_total"), S.rate("forage_rollout_trajectories_total")),
            "failed",
        ),
        steps=(Step(0.05, YELLOW), Step(0.2, RED)),
        least=0,
    )
    return board.build()
