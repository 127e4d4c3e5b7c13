"""The figures of the page Run."""

from __future__ import annotations

from collections.abc import Iterable

from forage_console.models.runs import CurveGroup

FIGURES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Reward", "", {"reward_mean": "mean", "reward_max": "highest", "reward_min": "lowest"}),
    ("Exact match of sampled answers", "share", {"em_mean": "all sources"}),
    (
        "Behaviour",
        "share",
        {
            "search_rate": "searches",
            "format_rate": "right format",
            "finished_rate": "finished",
            "truncated_rate": "truncated",
        },
    ),
    (
        "Signs of a collapse",
        "share",
        {
            "repetition_rate": "repeated 8-grams",
            "broken_tag_rate": "broken tags",
            "foreign_letter_rate": "letters in foreign scripts",
            "max_searches_rate": "all searches used",
        },
    ),
    ("KL to the reference", "nats", {"kl_ref": "of the policy", "kl_reward": "in the reward"}),
    ("Entropy", "nats", {"entropy": "of the policy"}),
    ("Gradient norm", "", {"grad_norm": "before clipping"}),
    ("Loss", "", {"loss": "of the policy", "critic/vf_loss": "of the critic"}),
    (
        "Trainer–engine mismatch",
        "nats",
        {
            "logprob_diff_mean": "same policy, mean",
            "mismatch_mean": "all tokens, mean",
            "mismatch_max": "all tokens, highest",
            "mismatch_kl": "KL",
            "canary_diff": "canary",
        },
    ),
    ("Importance weights", "", {"is_mean": "mean", "is_max": "highest", "is_min": "lowest"}),
    ("Staleness", "policy versions", {"staleness_mean": "mean", "staleness_max": "highest"}),
    (
        "Length",
        "tokens",
        {
            "response_tokens_mean": "response, mean",
            "response_tokens_max": "response, longest",
            "prompt_tokens_mean": "prompt, mean",
        },
    ),
    (
        "Turns and searches",
        "per trajectory",
        {
            "turns_mean": "turns",
            "searches_mean": "searches",
            "searches_beyond_limit_mean": "asked for beyond the limit",
        },
    ),
    (
        "Advantages",
        "",
        {"advantage_abs_mean": "mean size", "critic/advantages/max": "highest", "critic/advantages/min": "lowest"},
    ),
    (
        "Trajectories and groups",
        "count",
        {
            "failed": "failed trajectories",
            "dead_groups": "dead groups",
            "filtered_groups": "filtered groups",
            "dropped_stale": "dropped, too old",
            "dropped_stragglers": "dropped, too late",
            "refilled_groups": "issued again",
        },
    ),
    (
        "Idle",
        "s a step",
        {"seconds.wait": "trainer: waits for trajectories", "rollout_idle_s": "rollout: samples none for training"},
    ),
    ("Speed", "tokens/s", {"tokens_per_s": "trained on"}),
    ("Learning rate", "", {"lr": "of the policy"}),
)
"""Title, unit, and metric → label of each figure; figures show what a run has."""
PHASES = {
    "wait": "trainer idle: waits for trajectories",
    "logp": "log-probabilities",
    "ref": "reference policy",
    "values": "values",
    "critic": "critic",
    "probe": "probe",
    "update": "update",
    "publish": "publish",
    "checkpoint": "checkpoint",
}
_TIME = "Where the step's time goes"


def group_curves(names: Iterable[str]) -> list[CurveGroup]:
    """Group a run's metrics into figures; those without a figure of their own are in none."""
    known = set(names)
    figures = []
    for title, unit, curves in FIGURES:
        shown = {name: label for name, label in curves.items() if name in known}
        if title.startswith("Exact match"):
            shown |= {name: name.removeprefix("em/") for name in sorted(known) if name.startswith("em/")}
        if title == "Reward":
            shown |= {name: name.removeprefix("reward/") for name in sorted(known) if name.startswith("reward/")}
        if shown:
            figures.append(CurveGroup(title=title, unit=unit, curves=shown))
    spent = {f"seconds.{phase}": label for phase, label in PHASES.items() if f"seconds.{phase}" in known}
    others = (name for name in sorted(known - spent.keys() - {"seconds.total"}) if name.startswith("seconds."))
    spent |= {name: name.removeprefix("seconds.") for name in others}
    return [*figures, CurveGroup(title=_TIME, unit="s", curves=spent)] if spent else figures
