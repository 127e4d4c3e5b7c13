"""Metrics of one step, from its trajectories and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from prometheus_client import Counter, Gauge

from forage_proto.v1.trajectory_pb2 import Score, Status
from forage_records.statistics import mean_known
from forage_records.trajectory_file import count_searches
from forage_trainer.algorithms.token_rewards import compute_turn_sum
from forage_trainer.data.tensors import is_valid
from forage_trajectory.trajectory import Group, Trajectory

FORMAT = "format"
"""Name of the reward component that is positive where a trajectory has the right format."""

_GAUGES = {
    name: Gauge(f"forage_trainer_{name}", text)
    for name, text in {
        "step": "Optimizer steps taken: the version of the policy",
        "total_steps": "Steps of the whole run",
        "reward_mean": "Mean reward of the last step's trajectories",
        "em_mean": "Mean exact match of the last step's trajectories",
        "search_rate": "Share of the last step's trajectories with a search that was carried out",
        "format_rate": "Share of the last step's trajectories in the right format",
        "finished_rate": "Share of the last step's trajectories that ended with an answer",
        "truncated_rate": "Share of the last step's trajectories that were truncated at a length limit",
        "max_searches_rate": "Share of the last step's trajectories that searched as often as rollout.max_turns allows",
        "repetition_rate": "Share of 8-grams of the policy's tokens that occurred before in the same turn",
        "broken_tag_rate": "Share of the last step's trajectories with a turn without a valid action or paired tags",
        "foreign_letter_rate": "Share of the policy's letters in scripts that its questions and observations lack",
        "searches_mean": "Mean searches of the last step's trajectories that were carried out",
        "searches_beyond_limit_mean": "Mean valid searches beyond rollout.max_turns, which are not carried out",
        "turns_mean": "Mean turns of the last step's trajectories",
        "prompt_tokens_mean": "Mean tokens of the last step's prompts",
        "response_tokens_mean": "Mean tokens of the last step's responses, observations included",
        "response_tokens_max": "Tokens of the longest response of the last step",
        "advantage_abs_mean": "Mean absolute advantage of a token: 0 where a step gives no gradient",
        "staleness_mean": "Mean policy versions between sampling and training",
        "staleness_max": "Highest number of policy versions between sampling and training",
        "logprob_diff_mean": "Mean difference of trainer's and engine's log-probabilities under one policy",
        "logprob_diff_max": "Highest difference of trainer's and engine's log-probabilities under one policy",
        "mismatch_mean": "Mean difference of trainer's and engine's log-probabilities over all state tokens",
        "mismatch_kl": "KL of the engine's to the trainer's distribution over all state tokens (k3 estimate)",
        "kl_ref": "Mean KL of the policy to the reference",
        "kl_reward": "Mean KL to the reference in the KL penalty of the reward",
        "kl_reward_coef": "Coefficient of the KL penalty in the reward",
        "is_mean": "Mean importance weight of trainer against engine",
        "is_max": "Highest importance weight of trainer against engine",
        "is_masked": "Share of state tokens whose importance weight is 0",
        "probe_overconfidence": "Mean overconfidence of the last step's probed trajectories",
        "probe_penalty": "Mean penalty for overconfidence, subtracted from their advantages",
        "overlong_penalty_mean": "Mean penalty for length, subtracted from the rewards of the last step's trajectories",
        "overlong_filtered": "Trajectories of the last step that were left out of the losses: a limit cut them off",
        "loss": "Loss of the policy over the last step's updates",
        "clip_fraction": "Share of state tokens whose probability ratio was clipped",
        "entropy": "Mean entropy of the policy",
        "grad_norm": "Norm of the gradient before clipping",
        "lr": "Learning rate of the policy's optimizer",
        "tokens_per_s": "Tokens trained on per second",
    }.items()
}
_SECONDS = Gauge("forage_trainer_phase_seconds", "Seconds of each phase of the last step", ["phase"])
_DEAD = Counter("forage_trainer_dead_groups_total", "Groups with too few valid trajectories for the estimator")
_FILTERED = Counter("forage_trainer_filtered_groups_total", "Groups left out because their rewards were all equal")
_LEFT_OUT = Counter(
    "forage_trainer_trajectories_left_out_total",
    "Sound trajectories left out of steps: longer than a micro-batch, or sampled under a cut context",
    ["reason"],
)
for _reason in ("too_long", "cut"):
    _LEFT_OUT.labels(_reason)  # exported as 0 from the start
_KL_NON_FINITE = Counter("forage_trainer_kl_non_finite_tokens_total", "Tokens whose KL in the reward was not finite")
_TOKENS = Counter("forage_trainer_tokens_total", "Tokens of all trajectories trained on")
_TRAJECTORIES = Counter("forage_trainer_trajectories_total", "Trajectories of the steps taken", ["outcome"])
for _outcome in ("judged", "failed"):
    _TRAJECTORIES.labels(_outcome)  # exported as 0 from the start


def compute_trajectory_metrics(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """Compute means over the trajectories of a batch that policy `version` trains on.

    Failed trajectories are in none of the means: a failure is not a reward of 0. A mean over no trajectory is None.
    `reward/<component>` is what a component adds to `reward_mean`, `em/<data source>` the part of `em_mean`.
    `reward_mean` is of totals, in which turns count by their mean; in `reward_turn_sum_mean` they count by the sum of
    the turns that have tokens, which is the reward that turn_proportional places.
    """
    every = [t for group in groups for t in group.trajectories]
    completed = [t for t in every if t.status == Status.STATUS_OK]
    judged = [t for t in completed if t.score.status == Status.STATUS_OK and math.isfinite(t.score.total)]
    tokens = [t.counts for t in every]
    responses = [t.counts.response for t in completed]
    response_tokens, state_tokens = sum(one.response for one in tokens), sum(one.sampled for one in tokens)
    searched = [(t, count_searches(t.turns)) for t in completed]
    stale = [max(0, version - min(s.version for s in t.segments)) for t in every if t.segments]
    return {
        "reward_mean": mean_known(t.score.total for t in judged),
        "reward_max": max((t.score.total for t in judged), default=None),
        "reward_min": min((t.score.total for t in judged), default=None),
        "reward_turn_sum_mean": mean_known(compute_turn_sum(t) for t in judged if is_valid(t)),
        **{f"reward/{name}": added for name, added in sum_components(judged).items()},
        "em_mean": exact_match(t.validation_score for t in completed),
        **{
            f"em/{source}": exact_match(t.validation_score for t in completed if t.data_source == source)
            for source in sorted({t.data_source for t in completed})
        },
        "search_rate": mean_known(float(searches > 0) for _, searches in searched),
        "searches_mean": mean_known(float(searches) for _, searches in searched),
        "searches_beyond_limit_mean": mean_known(float(t.valid_searches - searches) for t, searches in searched),
        "format_rate": format_rate(t.score for t in completed),
        "finished_rate": mean_known(float(t.finished) for t in completed),
        "truncated_rate": mean_known(float(t.truncated) for t in completed),
        "turns_mean": mean_known(float(len(t.turns)) for t in completed),
        "response_tokens_mean": mean_known(map(float, responses)),
        "response_tokens_max": max(responses, default=None),
        "response_tokens_min": min(responses, default=None),
        "prompt_tokens_mean": mean_known(float(t.prompt_length) for t in completed),
        "without_state_tokens": sum(not t.counts.sampled for t in completed),
        "staleness_mean": mean_known(float(s) for s in stale),
        "staleness_max": max(stale, default=None),
        "trajectories": len(every),
        "failed": len(every) - len(judged),
        "tokens": sum(one.tokens for one in tokens),
        "state_tokens": state_tokens,
        "coverage": state_tokens / response_tokens if response_tokens else None,
    }


def sum_components(judged: Sequence[Trajectory]) -> dict[str, float]:
    """Compute what each component adds to the mean reward; a trajectory without it gets nothing from it."""
    sums: dict[str, float] = {}
    for trajectory in judged:
        for part in trajectory.score.components:
            sums[part.name] = sums.get(part.name, 0.0) + part.weighted
    return {name: total / len(judged) for name, total in sorted(sums.items())}


def exact_match(scores: Iterable[Score]) -> float | None:
    """Mean of validation scores, over those that were judged."""
    return mean_known(s.total for s in scores if s.status == Status.STATUS_OK and math.isfinite(s.total))


def format_rate(scores: Iterable[Score]) -> float | None:
    """Share in the right format, over the training rewards that have a component for it."""
    return mean_known(float(c.raw > 0) for score in scores for c in score.components if c.name == FORMAT)


def compute_log_prob_metrics(
    trainer: torch.Tensor,
    engine: torch.Tensor,
    reference: torch.Tensor | None,
    mask: torch.Tensor,
    current: torch.Tensor,
) -> dict[str, float | None]:
    """Compute differences between log-probabilities of the same tokens.

    Args:
        trainer, engine, reference: (rows, tokens).
        mask: state tokens; current: those sampled under exactly the trainer's policy.

    logprob_diff_*: |trainer - engine| over `current`; mismatch_*: over all state tokens, with the k3 estimate of
    KL(engine ‖ trainer); kl_ref: the k3 estimate of KL(policy ‖ reference).
    """
    state = mask.bool()
    same = (trainer - engine)[current].abs()
    delta = (trainer - engine)[state]
    metrics: dict[str, float | None] = {
        "logprob_diff_mean": float(same.mean()) if same.numel() else None,
        "logprob_diff_max": float(same.max()) if same.numel() else None,
        "mismatch_mean": float(delta.abs().mean()),
        "mismatch_max": float(delta.abs().max()),
        "mismatch_kl": float((delta.exp() - delta - 1).mean()),
        "kl_ref": None,
    }
    if reference is not None:
        difference = (reference - trainer)[state].clamp(-20, 20)
        metrics["kl_ref"] = float((difference.exp() - difference - 1).clamp(-10, 10).mean())
    return metrics


def compute_estimate_metrics(
    token_rewards: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor | None,
    mask: torch.Tensor,
) -> dict[str, float]:
    """Compute metrics of the estimator's input and output over the tokens of the mask, under verl's names.

    Args:
        token_rewards, advantages, returns, values, mask: (rows, tokens); values None without a critic.
    """
    inside = mask.bool()
    totals = torch.where(inside, token_rewards, 0.0).sum(-1)
    metrics = {"advantage_abs_mean": float(advantages[inside].abs().mean())}
    metrics |= _summarize("critic/rewards", totals)
    metrics |= _summarize("critic/advantages", advantages[inside])
    metrics |= _summarize("critic/returns", returns[inside])
    if values is not None:
        metrics |= _summarize("critic/values", values[inside])
        unexplained = (returns - values)[inside].var(correction=0) / (returns[inside].var(correction=0) + 1e-5)
        metrics["critic/vf_explained_var"] = float(1 - unexplained)
    return metrics


VERL_NAMES = {
    "critic/score/mean": "reward_mean",
    "critic/score/max": "reward_max",
    "critic/score/min": "reward_min",
    "response_length/mean": "response_tokens_mean",
    "response_length/max": "response_tokens_max",
    "response_length/min": "response_tokens_min",
    "prompt_length/mean": "prompt_tokens_mean",
    "num_turns/mean": "turns_mean",
    "state_tokens/total": "state_tokens",
    "state_tokens/coverage": "coverage",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "lr",
    "actor/reward_kl_penalty": "kl_reward",
    "actor/reward_kl_penalty_coeff": "kl_reward_coef",
    "rollout_corr/k3_kl": "mismatch_kl",
    "rollout_corr/rollout_is_mean": "is_mean",
    "rollout_corr/rollout_is_max": "is_max",
    "rollout_corr/rollout_is_min": "is_min",
    "rollout_corr/rollout_rs_masked_fraction": "is_masked",
}
"""verl's name (or Search-R1's) → our name of the same metric."""


def to_verl_names(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that verl has a name for, under that name."""
    return {theirs: metrics[ours] for theirs, ours in VERL_NAMES.items() if metrics.get(ours) is not None}


def export_metrics(metrics: dict[str, Any]) -> None:
    """Set the Prometheus metrics to those of a step."""
    for name, gauge in _GAUGES.items():
        if metrics.get(name) is not None:
            gauge.set(metrics[name])
    for phase, seconds in metrics["seconds"].items():
        _SECONDS.labels(phase).set(seconds)
    _DEAD.inc(metrics["dead_groups"])
    _FILTERED.inc(metrics.get("filtered_groups", 0))
    for reason in ("too_long", "cut"):
        _LEFT_OUT.labels(reason).inc(metrics.get(f"{reason}_trajectories", 0))
    _KL_NON_FINITE.inc(metrics.get("kl_non_finite", 0))
    _TOKENS.inc(metrics["tokens"])
    _TRAJECTORIES.labels("judged").inc(metrics["trajectories"] - metrics["failed"])
    _TRAJECTORIES.labels("failed").inc(metrics["failed"])


def _summarize(name: str, values: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
