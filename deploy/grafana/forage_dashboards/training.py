"""Training: does the policy learn, is the update sound, do trainer and engine agree."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from forage_dashboards.board import NEUTRAL, RED, YELLOW, Board, Query, Step
from forage_dashboards.queries import RELEASE as S


def _step(metric: str) -> str:
    return S.gauge(f"forage_trainer_{metric}")


_SECONDS = S.gauge("forage_trainer_phase_seconds", where='phase="total"')


def dashboard() -> Dashboard:
    """The page for who cares for the policy."""
    board = Board("training", "Training", "Does the policy learn? Figures of optimizer steps, as they are taken.")
    board.value("Steps taken", "Optimizer steps: the version of the policy.", "none", _step("step"), base=NEUTRAL)
    board.value(
        "Time left",
        "At the pace of the last step, to the end of the run.",
        "s",
        f"({_step('total_steps')} - {_step('step')}) * {_SECONDS}",
        base=NEUTRAL,
    )
    board.value("Reward", "Mean over the last step's trajectories.", "none", _step("reward_mean"), base=NEUTRAL)
    board.value(
        "Exact match, held out",
        "Of the last validation, over all data sources: greedy answers to questions that are not trained on.",
        "percentunit",
        S.gauge("forage_trainer_validation_source_em", how="avg"),
        base=NEUTRAL,
    )
    board.value(
        "Trainer against engine",
        "Mean difference of log-probabilities of the same tokens under the same policy, in nats. Small and steady is "
        "right; above 0.2, where the guard is by default, the two do not run the same model.",
        "none",
        _step("logprob_diff_mean"),
        Step(0.05, YELLOW),
        Step(0.2, RED),
    )
    board.value(
        "Guards set off",
        "Steps in the time shown that a guard objected to; the row below says which.",
        "none",
        f"round({S.grown('forage_trainer_guard_trips_total')})",
        Step(1, RED),
    )

    board.row("Does it learn")
    board.lines(
        "Reward",
        "Mean reward of a step's trajectories: noisy from step to step, it should rise over tens of them.",
        "none",
        Query(_step("reward_mean"), "reward"),
    )
    board.lines(
        "Exact match",
        "On the questions of training (sampled) and on held-out ones (greedy). Training that rises alone is learnt by "
        "heart.",
        "percentunit",
        Query(_step("em_mean"), "training"),
        Query(S.gauge("forage_trainer_validation_source_em", by="data_source"), "held out: {{data_source}}"),
        least=0,
        most=1,
    )
    board.lines(
        "Behaviour",
        "Shares of a step's trajectories: in the right format, with a valid search, with an answer, cut at a limit. "
        "Search that falls to 0 means that the policy answers from memory.",
        "percentunit",
        Query(_step("format_rate"), "format"),
        Query(_step("search_rate"), "searched"),
        Query(_step("finished_rate"), "answered"),
        Query(_step("truncated_rate"), "cut"),
        least=0,
        most=1,
    )
    board.lines(
        "Turns and searches",
        "Means of a trajectory.",
        "none",
        Query(_step("turns_mean"), "turns"),
        Query(_step("searches_mean"), "valid searches"),
        least=0,
    )
    board.lines(
        "Lengths",
        "Tokens of prompts and responses; what the environment said counts as response. Growth without reward is a "
        "policy that has learnt to talk.",
        "none",
        Query(_step("response_tokens_mean"), "response, mean"),
        Query(_step("response_tokens_max"), "response, longest"),
        Query(_step("prompt_tokens_mean"), "prompt, mean"),
        least=0,
    )
    board.lines(
        "Groups without a lesson",
        "Groups a second that were issued for training, and those of them that move nothing: rewards all equal, or too "
        "few valid trajectories. All of them equal: the questions are too easy or too hard.",
        "cps",
        Query(S.rate("forage_trainer_prompts_issued_total", where='purpose="train"'), "issued"),
        Query(S.rate("forage_trainer_filtered_groups_total"), "rewards all equal"),
        Query(S.rate("forage_trainer_dead_groups_total"), "too few valid"),
        least=0,
    )

    board.row("Is the update sound")
    board.lines(
        "KL to the reference",
        "How far the policy has gone from where it began, in nats a token: in the loss, and in the reward where it is "
        "used there. A jump is a policy that falls apart.",
        "none",
        Query(_step("kl_ref"), "KL in the loss"),
        Query(_step("kl_reward"), "KL in the reward"),
    )
    board.lines(
        "Entropy",
        "Of the policy, in nats a token. Towards 0 it explores no more and learns no more.",
        "none",
        Query(_step("entropy"), "entropy"),
        steps=(Step(0.01, RED),),
    )
    board.lines(
        "Clip fraction",
        "Share of tokens whose ratio of probabilities was clipped. Often above 0.2: the learning rate or the number of "
        "updates of a batch is too high.",
        "percentunit",
        Query(_step("clip_fraction"), "clipped"),
        steps=(Step(0.2, YELLOW),),
        least=0,
    )
    board.lines("Loss", "Of the policy; its sign and size mean little, jumps do.", "none", Query(_step("loss"), "loss"))
    board.lines(
        "Gradient norm",
        "Before clipping. A guard objects to ten times the usual.",
        "none",
        Query(_step("grad_norm"), "norm"),
        least=0,
    )
    board.lines("Learning rate", "What the schedule gives.", "sci", Query(_step("lr"), "learning rate"), least=0)
    board.lines(
        "Advantage",
        "Mean absolute advantage of a token: 0 = nothing to learn from.",
        "none",
        Query(_step("advantage_abs_mean"), "advantage"),
        least=0,
    )
    board.lines(
        "Guards",
        "How often each guard objected, by what was done about it.",
        "none",
        Query(S.gauge("forage_trainer_guard_trips_total", by="guard, action", how="sum"), "{{guard}}: {{action}}"),
        least=0,
    )
    board.lines(
        "Rollbacks",
        "Times that this run went back to an earlier checkpoint.",
        "none",
        Query(_step("rollbacks"), "rollbacks"),
        least=0,
    )

    board.row("Do trainer and engine agree")
    board.lines(
        "Log-probabilities under one policy",
        "Difference of trainer's and engine's, of the same tokens under the same policy, in nats: numerics alone.",
        "none",
        Query(_step("logprob_diff_mean"), "mean"),
        Query(_step("logprob_diff_max"), "highest"),
        steps=(Step(0.2, RED),),
        least=0,
    )
    board.lines(
        "Mismatch over all tokens",
        "Numerics and staleness together: difference of log-probabilities, and the KL of the two distributions.",
        "none",
        Query(_step("mismatch_mean"), "difference"),
        Query(_step("mismatch_kl"), "KL"),
        least=0,
    )
    board.lines(
        "Importance weights",
        "Of trainer against engine, where they correct for the mismatch (trainer.algorithm.rollout_correction): mean "
        "near 1, few masked.",
        "none",
        Query(_step("is_mean"), "mean"),
        Query(_step("is_max"), "highest"),
        Query(_step("is_masked"), "share masked"),
        least=0,
    )

    board.row("Time")
    board.lines(
        "Time of a step",
        "By phase. `wait` is what the rollout service makes the trainer wait.",
        "s",
        Query(S.gauge("forage_trainer_phase_seconds", by="phase", where='phase!="total"'), "{{phase}}"),
        stacked=True,
        least=0,
    )
    board.lines(
        "Tokens trained on",
        "A second of the last step.",
        "suffix: tokens/s",
        Query(_step("tokens_per_s"), "tokens/s"),
        least=0,
    )
    board.lines(
        "Checkpoint copies",
        "Copies to trainer.upload_url: those that wait, and attempts that failed or were overtaken.",
        "none",
        Query(_step("uploads_waiting"), "waiting"),
        Query(S.gauge("forage_trainer_upload_failures_total", how="sum"), "failed attempts"),
        Query(S.gauge("forage_trainer_uploads_dropped_total", how="sum"), "overtaken"),
        least=0,
    )
    return board.build()
