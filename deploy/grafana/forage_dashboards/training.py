"""The training dashboard: learning progress, stability of updates, agreement of trainer and engine."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, DashboardBuilder, Query, Step
from forage_dashboards.queries import RELEASE as S


def _step(metric: str) -> str:
    return S.aggregate(f"forage_trainer_{metric}")


_SECONDS = S.aggregate("forage_trainer_phase_seconds", where='phase="total"')


def build_dashboard() -> Dashboard:
    """Build the dashboard of the policy."""
    board = DashboardBuilder("training", "Training", "Learning progress and stability: metrics of optimizer steps.")
    board.add_stat("Steps", "Optimizer steps, which are also the policy version.", "none", _step("step"), base=NEUTRAL)
    board.add_stat(
        "Time left",
        "Estimated time to the end of the run at the speed of the last step.",
        "s",
        f"({_step('total_steps')} - {_step('step')}) * {_SECONDS}",
        base=NEUTRAL,
    )
    board.add_stat("Reward", "Mean reward of the last step's trajectories.", "none", _step("reward_mean"), base=NEUTRAL)
    board.add_stat(
        "Validation exact match",
        "Exact match of greedy answers in the last validation, averaged over data sources.",
        "percentunit",
        S.aggregate("forage_trainer_validation_source_em", how="avg"),
        base=NEUTRAL,
    )
    board.add_stat(
        "Log-prob difference",
        "Mean absolute difference of trainer and engine log-probabilities of the same tokens under the same policy, in "
        "nats. Above 0.2, the default limit of the guard, the two do not run the same model.",
        "none",
        _step("logprob_diff_mean"),
        Step(0.05, YELLOW),
        Step(0.2, RED),
    )
    board.add_stat(
        "Guard trips",
        "Guard trips in the selected time range; the panel Guards shows which.",
        "none",
        f"round({S.compute_increase('forage_trainer_guard_trips_total')})",
        Step(1, RED),
    )

    board.add_row("Learning")
    board.add_timeseries(
        "Reward",
        "Mean reward of a step's trajectories: noisy between steps, it should rise over tens of steps.",
        "none",
        Query(_step("reward_mean"), "reward"),
    )
    board.add_timeseries(
        "Exact match",
        "On training questions (sampled) and on validation questions (greedy). If only training rises, the policy "
        "overfits.",
        "percentunit",
        Query(_step("em_mean"), "training"),
        Query(S.aggregate("forage_trainer_validation_source_em", by="data_source"), "validation: {{data_source}}"),
        minimum=0,
        maximum=1,
    )
    board.add_timeseries(
        "Behaviour",
        "Shares of a step's trajectories: valid format, at least one search, with an answer, truncated. A search "
        "rate that falls to 0 means that the policy answers from memory.",
        "percentunit",
        Query(_step("format_rate"), "format"),
        Query(_step("search_rate"), "searched"),
        Query(_step("finished_rate"), "answered"),
        Query(_step("truncated_rate"), "truncated"),
        minimum=0,
        maximum=1,
    )
    board.add_timeseries(
        "Signs of a collapse",
        "Of what the policy writes: 8-grams that it repeats, trajectories with broken tags or with all searches that "
        "it may make, letters in scripts that it was not given. The guard collapse warns when one of them rises.",
        "percentunit",
        Query(_step("repetition_rate"), "repeated 8-grams"),
        Query(_step("broken_tag_rate"), "broken tags"),
        Query(_step("foreign_letter_rate"), "foreign letters"),
        Query(_step("max_searches_rate"), "all searches"),
        minimum=0,
        maximum=1,
    )
    board.add_timeseries(
        "Turns and searches",
        "Means per trajectory.",
        "none",
        Query(_step("turns_mean"), "turns"),
        Query(_step("searches_mean"), "searches"),
        Query(_step("searches_beyond_limit_mean"), "asked for beyond rollout.max_turns"),
        minimum=0,
    )
    board.add_timeseries(
        "Lengths",
        "Tokens of prompts and responses; observations count as response. Growth without a rise of the reward means "
        "that the policy only writes longer texts.",
        "none",
        Query(_step("response_tokens_mean"), "response, mean"),
        Query(_step("response_tokens_max"), "response, longest"),
        Query(_step("prompt_tokens_mean"), "prompt, mean"),
        minimum=0,
    )
    board.add_timeseries(
        "Groups without signal",
        "Groups per second: issued for training, and those without a gradient because all rewards are equal or too few "
        "trajectories are valid. If most have equal rewards, the questions are too easy or too hard.",
        "cps",
        Query(S.compute_rate("forage_trainer_prompts_issued_total", where='purpose="train"'), "issued"),
        Query(S.compute_rate("forage_trainer_filtered_groups_total"), "equal rewards"),
        Query(S.compute_rate("forage_trainer_dead_groups_total"), "too few valid trajectories"),
        minimum=0,
    )

    board.add_row("Stability")
    board.add_timeseries(
        "KL to the reference",
        "KL divergence from the reference policy in nats per token, in the loss and, where configured, in the reward. "
        "A jump means that the policy collapses.",
        "none",
        Query(_step("kl_ref"), "KL in the loss"),
        Query(_step("kl_reward"), "KL in the reward"),
    )
    board.add_timeseries(
        "Entropy",
        "Entropy of the policy in nats per token. Near 0 it stops exploring and learning.",
        "none",
        Query(_step("entropy"), "entropy"),
        steps=(Step(0.01, RED),),
    )
    board.add_timeseries(
        "Clip fraction",
        "Share of tokens whose probability ratio was clipped. If it is often above 0.2, the learning rate or the "
        "number of updates per batch is too high.",
        "percentunit",
        Query(_step("clip_fraction"), "clipped"),
        steps=(Step(0.2, YELLOW),),
        minimum=0,
    )
    board.add_timeseries(
        "Loss",
        "Policy loss. Its sign and size mean little, but jumps indicate a problem.",
        "none",
        Query(_step("loss"), "loss"),
    )
    board.add_timeseries(
        "Gradient norm",
        "Gradient norm before clipping. A guard trips at ten times the usual norm.",
        "none",
        Query(_step("grad_norm"), "norm"),
        minimum=0,
    )
    board.add_timeseries(
        "Learning rate", "Learning rate of the schedule.", "sci", Query(_step("lr"), "learning rate"), minimum=0
    )
    board.add_timeseries(
        "Advantage",
        "Mean absolute advantage per token; 0 means no learning signal.",
        "none",
        Query(_step("advantage_abs_mean"), "advantage"),
        minimum=0,
    )
    board.add_timeseries(
        "Guards",
        "Trips of each guard by action.",
        "none",
        Query(S.aggregate("forage_trainer_guard_trips_total", by="guard, action", how="sum"), "{{guard}}: {{action}}"),
        minimum=0,
    )
    board.add_timeseries(
        "Rollbacks",
        "Returns of this run to an earlier checkpoint.",
        "none",
        Query(_step("rollbacks"), "rollbacks"),
        minimum=0,
    )

    board.add_row("Trainer and engine agreement")
    board.add_timeseries(
        "Log-prob difference, same policy",
        "Difference of trainer and engine log-probabilities for tokens of the same policy version, in nats: numerical "
        "differences only.",
        "none",
        Query(_step("logprob_diff_mean"), "mean"),
        Query(_step("logprob_diff_max"), "highest"),
        steps=(Step(0.2, RED),),
        minimum=0,
    )
    board.add_timeseries(
        "Mismatch, all tokens",
        "Numerical differences and staleness: difference of log-probabilities and KL divergence.",
        "none",
        Query(_step("mismatch_mean"), "difference"),
        Query(_step("mismatch_kl"), "KL"),
        minimum=0,
    )
    board.add_timeseries(
        "Importance weights",
        "Importance weights of trainer over engine (trainer.algorithm.rollout_correction). The mean should be near 1 "
        "and few tokens masked.",
        "none",
        Query(_step("is_mean"), "mean"),
        Query(_step("is_max"), "highest"),
        Query(_step("is_masked"), "masked share"),
        minimum=0,
    )

    board.add_row("Time")
    board.add_timeseries(
        "Step time",
        "Time of the last step by phase. `wait` is the time that the trainer waits for groups.",
        "s",
        Query(S.aggregate("forage_trainer_phase_seconds", by="phase", where='phase!="total"'), "{{phase}}"),
        stacked=True,
        minimum=0,
    )
    board.add_timeseries(
        "Tokens trained on",
        "Tokens per second of the last step.",
        "suffix: tokens/s",
        Query(_step("tokens_per_s"), "tokens/s"),
        minimum=0,
    )
    board.add_timeseries(
        "Checkpoint copies",
        "Copies to trainer.upload_url: waiting, failed attempts, and copies superseded by a newer checkpoint.",
        "none",
        Query(_step("uploads_waiting"), "waiting"),
        Query(S.aggregate("forage_trainer_upload_failures_total", how="sum"), "failed attempts"),
        Query(S.aggregate("forage_trainer_uploads_dropped_total", how="sum"), "superseded"),
        minimum=0,
    )
    return board.build()
