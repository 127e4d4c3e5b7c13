"""The pipeline dashboard: waiting, throughput, staleness and losses between trainer and rollout."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, DashboardBuilder, Query, Step
from forage_dashboards.queries import RELEASE as S
from forage_dashboards.queries import compute_ratio

_WAITING = f"clamp_max({S.compute_rate('forage_trainer_wait_seconds_total')}, 1)"
_ENGINES = S.aggregate("forage_rollout_replicas", where='deployment="Engine"', how="sum")
_IDLE = f"1 - clamp_max({S.compute_rate('forage_rollout_busy_seconds_total')} / ({_ENGINES} > 0), 1)"
# Each pod of the rollout exports the same values of the streams, hence the maximum.
_PROMPTS = S.aggregate("forage_rollout_prompts_on_stream")
_IN_FLIGHT = S.aggregate("forage_rollout_groups_in_flight", how="sum")


def build_dashboard() -> Dashboard:
    """Build the dashboard to open first."""
    board = DashboardBuilder(
        "pipeline", "Pipeline", "Flow of work between trainer, rollout and the streams between them."
    )
    board.add_stat(
        "Alerts",
        "Firing alerts of Forage. Also 0 where Prometheus has not loaded the rules.",
        "none",
        'count(ALERTS{alertname=~"Forage.*", alertstate="firing", namespace=~"$namespace"}) or vector(0)',
        Step(1, RED),
    )
    board.add_stat(
        "Not ready",
        "Dependencies that services wait for; /readyz of each service names them.",
        "none",
        f"{S.aggregate('forage_common_waiting', how='sum')} or vector(0)",
        Step(1, YELLOW),
    )
    board.add_stat(
        "Trainer waiting",
        "Share of time that the trainer waits for groups. Near 1: the rollout is the bottleneck.",
        "percentunit",
        _WAITING,
        Step(0.5, YELLOW),
        Step(0.8, RED),
    )
    board.add_stat(
        "Engines idle",
        "Share of time without a request in the engines. If high while the trainer computes, raise max_staleness.",
        "percentunit",
        _IDLE,
        Step(0.5, YELLOW),
        Step(0.8, RED),
    )
    board.add_stat(
        "Prompts waiting",
        "Prompts on the stream that no worker has claimed.",
        "none",
        f"clamp_min({_PROMPTS} - {_IN_FLIGHT}, 0)",
        base=NEUTRAL,
    )
    board.add_stat(
        "Staleness",
        "Highest staleness of the last step as a share of trainer.max_staleness; groups above 1 are dropped.",
        "percentunit",
        f"{S.aggregate('forage_trainer_staleness_max')} / clamp_min({S.aggregate('forage_trainer_max_staleness')}, 1)",
        base=NEUTRAL,
    )

    board.add_row("Waiting")
    board.add_timeseries(
        "Starvation",
        "Shares of time: the trainer waits for groups, the engines are idle, or the rollout claims no prompts because "
        "the trajectory stream is full (backpressure). One of the first two is normal; both at once mean that a "
        "component between them is slow.",
        "percentunit",
        Query(_WAITING, "trainer waiting"),
        Query(_IDLE, "engines idle"),
        Query(f"clamp_max({S.compute_rate('forage_rollout_backpressure_seconds_total')}, 1)", "backpressure"),
        minimum=0,
        maximum=1,
    )
    board.add_timeseries(
        "Queues",
        "Prompts on the stream, groups in flight, and groups that wait for the trainer or its checkpoint.",
        "none",
        Query(_PROMPTS, "prompts on stream"),
        Query(_IN_FLIGHT, "groups in flight"),
        Query(S.aggregate("forage_rollout_trajectories_on_stream"), "groups on stream"),
        minimum=0,
    )
    board.add_timeseries(
        "Step time",
        "Time of the last step by phase.",
        "s",
        Query(S.aggregate("forage_trainer_phase_seconds", by="phase", where='phase!="total"'), "{{phase}}"),
        stacked=True,
        minimum=0,
    )

    board.add_row("Throughput")
    board.add_timeseries(
        "Groups",
        "Groups per second: issued by the trainer and finished by the rollout, including validation.",
        "suffix: groups/s",
        Query(S.compute_rate("forage_trainer_prompts_issued_total"), "issued"),
        Query(S.compute_rate("forage_rollout_groups_done_total"), "finished"),
        minimum=0,
    )
    board.add_timeseries(
        "Tokens",
        "Tokens per second: sampled by engines, in finished trajectories, and trained on (including prompts).",
        "suffix: tokens/s",
        Query(S.compute_rate("forage_rollout_sampled_tokens_total"), "sampled"),
        Query(S.compute_rate("forage_rollout_generated_tokens_total"), "in finished trajectories"),
        Query(S.compute_rate("forage_trainer_tokens_total"), "trained on"),
        minimum=0,
    )
    board.add_timeseries(
        "Trajectories",
        "Trajectories per second: finished by the rollout, failed, and consumed by the trainer by outcome.",
        "suffix: /s",
        Query(S.compute_rate("forage_rollout_trajectories_total"), "finished"),
        Query(S.compute_rate("forage_rollout_failed_trajectories_total"), "failed"),
        Query(S.compute_rate("forage_trainer_trajectories_total", by="outcome"), "trainer: {{outcome}}"),
        minimum=0,
    )

    board.add_row("Staleness")
    board.add_timeseries(
        "Staleness",
        "Policy versions between sampling and training of a step's trajectories, and the limit.",
        "none",
        Query(S.aggregate("forage_trainer_staleness_mean"), "mean"),
        Query(S.aggregate("forage_trainer_staleness_max"), "highest"),
        Query(S.aggregate("forage_trainer_max_staleness"), "limit"),
        minimum=0,
    )
    board.add_timeseries(
        "Policy versions",
        "Announced version and version served by each engine. An engine that stays behind cannot load the policy.",
        "none",
        Query(S.aggregate("forage_rollout_policy_announced_version"), "announced"),
        Query(S.aggregate("forage_rollout_replica_policy_version", by="replica"), "{{replica}}"),
    )
    board.add_timeseries(
        "Publishing",
        "Time to write and announce the last policy, and the generation pause of an update.",
        "s",
        Query(S.aggregate("forage_trainer_publish_seconds"), "write and announce"),
        Query(
            compute_ratio(
                S.compute_rate("forage_rollout_policy_pause_seconds_total"),
                S.compute_rate("forage_rollout_policy_updates_total"),
            ),
            "generation pause",
        ),
        minimum=0,
    )

    board.add_row("Losses and recovery")
    board.add_timeseries(
        "Groups not trained on",
        "In the selected time range, by reason. Stale groups are issued again; redelivered duplicates are discarded.",
        "none",
        Query(S.compute_increase("forage_trainer_groups_dropped_total", by="reason"), "{{reason}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Lost, rejected, left out",
        "In the selected time range: groups that vanished and were issued again, groups that the run never issued, "
        "sound trajectories that a step left out, by reason.",
        "none",
        Query(S.compute_increase("forage_trainer_groups_lost_total"), "lost and issued again"),
        Query(S.compute_increase("forage_trainer_groups_rejected_total"), "rejected"),
        Query(S.compute_increase("forage_trainer_trajectories_left_out_total", by="reason"), "left out: {{reason}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Redelivered groups",
        "In the selected time range: reclaimed from a dead worker, released to another one, run again, finished twice, "
        "given up.",
        "none",
        *(
            Query(S.compute_increase(f"forage_rollout_{name}_total"), legend)
            for name, legend in (
                ("groups_reclaimed", "reclaimed"),
                ("groups_released", "released"),
                ("runs_repeated", "run again"),
                ("groups_duplicated", "finished twice"),
                ("groups_failed", "given up"),
            )
        ),
        minimum=0,
    )
    board.add_timeseries(
        "Redis unavailable, disk full",
        "Calls and writes per second that found Redis unavailable, refused a group, or the disk full; all are retried.",
        "cps",
        Query(S.compute_rate("forage_trainer_redis_waits_total"), "trainer"),
        Query(S.compute_rate("forage_rollout_redis_waits_total"), "rollout"),
        Query(S.compute_rate("forage_rollout_writes_repeated_total"), "rollout: group not written"),
        Query(S.compute_rate("forage_trainer_disk_waits_total"), "trainer: disk full"),
        minimum=0,
    )
    board.add_timeseries(
        "Failed calls",
        "Calls per second by called service: retried, and given up (the trajectory fails).",
        "cps",
        Query(S.compute_rate("forage_rollout_call_retries_total", by="service"), "{{service}}: retried"),
        Query(S.compute_rate("forage_rollout_calls_given_up_total", by="service"), "{{service}}: given up"),
        minimum=0,
    )
    board.add_timeseries(
        "Phase of the trainer",
        "1 for the current phase.",
        "none",
        Query(S.aggregate("forage_trainer_phase", by="phase"), "{{phase}}"),
        minimum=0,
        maximum=1,
        stacked=True,
    )
    board.add_timeseries(
        "Failure ratio",
        "Share of trajectories without a valid score; they are excluded from the loss.",
        "percentunit",
        Query(
            compute_ratio(
                S.compute_rate("forage_rollout_failed_trajectories_total"),
                S.compute_rate("forage_rollout_trajectories_total"),
            ),
            "failed",
        ),
        steps=(Step(0.05, YELLOW), Step(0.2, RED)),
        minimum=0,
    )
    return board.build()
