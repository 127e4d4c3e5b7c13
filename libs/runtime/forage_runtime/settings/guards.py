"""Settings of the guards: which values of a training metric are refused, and what follows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forage_runtime.settings.base import Section

GuardAction = Literal["ignore", "warn", "stop", "rollback"]
"""Action of the trainer when a guard trips."""


class Guard(Section):
    """A check of one metric after every optimizer step."""

    action: GuardAction = Field(
        "warn",
        description="Reaction when the guard trips: ignore, log a warning, stop the run, or rollback to a checkpoint",
    )


class NonFiniteGuard(Guard):
    """Trips when the loss or the gradient norm is NaN or infinite."""

    action: GuardAction = Field(
        "rollback", description="Reaction when the loss or the gradient norm is NaN or infinite"
    )


class GradNormGuard(Guard):
    """Trips on a spike of the gradient norm."""

    threshold: float = Field(10.0, gt=1, description="Highest gradient norm, as a multiple of the window's median")


class KlGuard(Guard):
    """Trips when the policy drifts from the reference policy."""

    threshold: float = Field(1.0, gt=0, description="Highest mean KL to the reference policy, nats per token")


class RewardGuard(Guard):
    """Trips when the mean reward collapses."""

    threshold: float = Field(
        0.5, gt=0, le=1, description="Largest drop of the window's mean reward, as a share of its highest value so far"
    )


class EntropyGuard(Guard):
    """Trips when the policy's entropy collapses."""

    threshold: float = Field(0.01, ge=0, description="Lowest mean entropy, nats per token")


class DeadGroupsGuard(Guard):
    """Trips when too few groups carry a learning signal."""

    threshold: float = Field(
        0.9, ge=0, lt=1, description="Highest share of a batch's groups without a gradient: failed or filtered out"
    )


class LogProbGuard(Guard):
    """Trips when trainer and engine disagree on the probabilities of sampled tokens."""

    threshold: float = Field(
        0.2, gt=0, description="Highest mean difference between log-probabilities of trainer and engine, nats per token"
    )


class CollapseGuard(Guard):
    """Trips when a sign of a collapse rises: entropy, repetition, broken tags, foreign letters, searches, mismatch."""


class GuardSettings(Section):
    """Guards on the metrics of every optimizer step."""

    max_rollbacks: int = Field(3, ge=0, description="Rollbacks of a run; the next one stops the run instead")
    non_finite: NonFiniteGuard = NonFiniteGuard()
    grad_norm: GradNormGuard = GradNormGuard()
    kl: KlGuard = KlGuard()
    reward: RewardGuard = RewardGuard()
    entropy: EntropyGuard = EntropyGuard()
    dead_groups: DeadGroupsGuard = DeadGroupsGuard()
    logprob: LogProbGuard = LogProbGuard()
    collapse: CollapseGuard = CollapseGuard()
