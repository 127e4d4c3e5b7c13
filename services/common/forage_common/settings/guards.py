"""Settings of the guards: when a metric of training trips one, and what follows."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from forage_common.settings.base import Section


class GuardAction(StrEnum):
    """What happens when a guard trips."""

    IGNORE = "ignore"
    WARN = "warn"
    STOP = "stop"
    ROLLBACK = "rollback"


class Guard(Section):
    """A check of one metric after every step; it trips where the metric passes the guard's threshold."""

    action: GuardAction = Field(
        GuardAction.WARN, description="when the guard trips: ignore, warn, stop the run, or rollback to a checkpoint"
    )


class NonFiniteGuard(Guard):
    """Trips on a loss or a gradient norm that is NaN or infinite."""

    action: GuardAction = Field(
        GuardAction.ROLLBACK,
        description="when loss or gradient norm is NaN or infinite: ignore, warn, stop, or rollback",
    )


class GradNormGuard(Guard):
    threshold: float = Field(10.0, gt=1, description="gradient norm, times the median of the last window steps")


class KlGuard(Guard):
    threshold: float = Field(1.0, gt=0, description="mean KL to the reference, nats a token")


class RewardGuard(Guard):
    threshold: float = Field(
        0.5, gt=0, le=1, description="share of its highest value that the mean reward of window steps may lose"
    )


class EntropyGuard(Guard):
    threshold: float = Field(0.01, ge=0, description="lowest mean entropy, nats a token")


class DeadGroupsGuard(Guard):
    threshold: float = Field(0.9, ge=0, lt=1, description="highest share of a batch's groups that teach nothing")


class LogProbGuard(Guard):
    threshold: float = Field(
        0.2, gt=0, description="highest mean difference of trainer's and engine's log-probabilities, nats"
    )


class GuardSettings(Section):
    window: int = Field(20, ge=2, description="steps that a guard compares with; it is silent until it has seen half")
    max_rollbacks: int = Field(3, ge=0, description="of a run; one more trip stops it")
    non_finite: NonFiniteGuard = NonFiniteGuard()
    grad_norm: GradNormGuard = GradNormGuard()
    kl: KlGuard = KlGuard()
    reward: RewardGuard = RewardGuard()
    entropy: EntropyGuard = EntropyGuard()
    dead_groups: DeadGroupsGuard = DeadGroupsGuard()
    logprob: LogProbGuard = LogProbGuard()
