"""Settings of the algorithm: advantage, KL, off-policy correction."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from forage_runtime.settings.base import FunctionName, Section

KlKind = Literal["kl", "abs", "mse", "low_var_kl"]
"""Estimator of a token's KL to the reference policy, as in verl."""


class AdvantageEstimator(StrEnum):
    """How advantages are computed from rewards."""

    GRPO = "grpo"
    GRPO_MULTITURN = "grpo_multiturn"
    GAE = "gae"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"

    @property
    def min_samples(self) -> int:
        """Valid samples that a group needs: two for estimators that compare samples of a group, else one."""
        return 1 if self in (AdvantageEstimator.GAE, AdvantageEstimator.REINFORCE_PLUS_PLUS) else 2


class RewardPlacement(StrEnum):
    """Tokens that get a score with rewards of turns; a score without them is always on the last token."""

    AUTO = "auto"
    TURN_PROPORTIONAL = "turn_proportional"
    FINAL_TOKEN_ONLY = "final_token_only"


class KlControlSettings(Section):
    """Coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = Field(
        "fixed", description="fixed: always kl_coef; adaptive: steered to target_kl"
    )
    kl_coef: float = Field(0.001, ge=0, allow_inf_nan=False, description="Coefficient; adaptive: its initial value")
    target_kl: float = Field(0.1, gt=0, description="adaptive: mean KL per trajectory to aim at")
    horizon: int = Field(
        10000, ge=1, description="adaptive: trajectories over which the coefficient changes by at most a fifth"
    )


class CorrectionSettings(Section):
    """Importance weights by the ratio of trainer to engine probability of each token."""

    mode: Literal["none", "tis", "decoupled", "icepop"] = Field(
        "tis",
        description="Weight of a token: none: 1; tis: the ratio, at most rollout_is_threshold; decoupled: the ratio; "
        "icepop: the ratio, 0 outside icepop",
    )
    rollout_is_threshold: float = Field(2.0, gt=1, description="tis: highest weight")
    icepop: tuple[float, float] = Field(
        (0.5, 5.0), description="icepop: lowest and highest ratio with a weight above 0; 1 is between them"
    )

    @model_validator(mode="after")
    def _check_icepop(self) -> CorrectionSettings:
        low, high = self.icepop
        if not 0 < low <= 1 <= high:
            raise ValueError(f"icepop is [{low:g}, {high:g}]: expected a number above 0 up to 1, and one from 1")
        return self


class OverlongSettings(Section):
    """What long and cut trajectories cost, after DAPO (arXiv 2503.14476)."""

    filter: bool = Field(
        False, description="Leave trajectories that a limit cut off, so without an answer, out of every loss"
    )
    buffer_len: int = Field(0, ge=0, description="Tokens below max_len over which a penalty grows; 0: no penalty")
    max_len: int = Field(0, ge=0, description="Generated tokens of a trajectory that get the whole penalty")
    penalty_factor: float = Field(1.0, gt=0, allow_inf_nan=False, description="The whole penalty")

    @model_validator(mode="after")
    def _check_buffer(self) -> OverlongSettings:
        if self.buffer_len and not self.max_len > self.buffer_len:
            raise ValueError(
                f"the penalty begins buffer_len = {self.buffer_len} tokens below max_len = {self.max_len}: "
                "give max_len, the most tokens that a trajectory should generate"
            )
        if not self.buffer_len and (self.max_len or self.penalty_factor != 1.0):
            raise ValueError("max_len and penalty_factor are of a penalty, and buffer_len = 0 is none: give buffer_len")
        return self


class ProbePenaltySettings(Section):
    """A penalty on advantages for overconfidence: a trajectory of each group is probed at every step, as trainer.probe
    says."""

    coef: float = Field(0.0, ge=0, allow_inf_nan=False, description="Factor of the overconfidence; 0: no probes")


class AlgorithmSettings(Section):
    """Advantages, rewards per token and the KL in the reward; names as verl's."""

    adv_estimator: AdvantageEstimator = Field(AdvantageEstimator.GRPO, description="Advantage estimator")
    estimator: FunctionName = Field(
        "",
        description="An estimator of your own, FILE.py:FUNCTION or MODULE:FUNCTION, instead of adv_estimator's; that "
        "still says which rows take part, and whether there is a critic",
    )
    norm_adv_by_std_in_grpo: bool = Field(
        True, description="grpo, grpo_multiturn: divide by the group's standard deviation; false: Dr. GRPO"
    )
    turn_weight: float = Field(
        0.5, ge=0, allow_inf_nan=False, description="grpo_multiturn: weight of the turn advantage"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="gae, reinforce_plus_plus: discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="gae: lambda, the trade-off of bias and variance")
    state_masking: bool = Field(True, description="Train on the model's tokens only; false: on observations too")
    reward_placement: RewardPlacement = Field(
        RewardPlacement.AUTO,
        description="Tokens that get a score with rewards of turns; auto: turn_proportional if use_kl_in_reward, "
        "except with gae, else final_token_only",
    )
    filter_groups: bool = Field(False, description="Drop groups whose rewards are all equal")
    use_kl_in_reward: bool = Field(False, description="Subtract the KL to the reference policy from token rewards")
    kl_penalty: KlKind = Field("kl", description="KL estimator of the KL in the reward")
    kl_ctrl: KlControlSettings = KlControlSettings()
    rollout_correction: CorrectionSettings = CorrectionSettings()
    overlong: OverlongSettings = OverlongSettings()
    probe_penalty: ProbePenaltySettings = ProbePenaltySettings()

    @property
    def placement(self) -> RewardPlacement:
        """`reward_placement` with `auto` resolved."""
        if self.reward_placement is not RewardPlacement.AUTO:
            return self.reward_placement
        spread = self.use_kl_in_reward and self.adv_estimator is not AdvantageEstimator.GAE
        return RewardPlacement.TURN_PROPORTIONAL if spread else RewardPlacement.FINAL_TOKEN_ONLY

    @model_validator(mode="after")
    def _check_estimator(self) -> AlgorithmSettings:
        estimator = self.adv_estimator
        if self.filter_groups and estimator.min_samples == 1:
            raise ValueError(
                f"filter_groups drops groups of equal rewards, which teach {estimator} something: "
                "set filter_groups=false, or an adv_estimator that compares within a group"
            )
        if self.use_kl_in_reward and estimator is AdvantageEstimator.GRPO_MULTITURN:
            raise ValueError(
                "adv_estimator grpo_multiturn is computed from turns, where a KL in the reward would be lost: "
                "set use_kl_in_reward=false and trainer.actor.use_kl_loss=true"
            )
        return self
