"""Settings of the algorithm: advantage, KL, off-policy correction."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from forage_common.settings.base import Section

KL_KINDS = "^(kl|abs|mse|low_var_kl)$"
"""Estimates of a token's KL to the reference."""


class AdvantageEstimator(StrEnum):
    """Which advantage the actor is trained on."""

    GRPO = "grpo"
    GRPO_MULTITURN = "grpo_multiturn"
    GAE = "gae"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"

    @property
    def min_samples(self) -> int:
        """Valid samples that a prompt needs to teach something: two where they are compared with each other."""
        return 1 if self in (AdvantageEstimator.GAE, AdvantageEstimator.REINFORCE_PLUS_PLUS) else 2


class RewardPlacement(StrEnum):
    """Where a score with rewards of single turns lands; any other score is on the last state token."""

    AUTO = "auto"
    TURN_PROPORTIONAL = "turn_proportional"
    FINAL_TOKEN_ONLY = "final_token_only"


class KlControl(StrEnum):
    """What becomes of the coefficient of a KL in the reward."""

    FIXED = "fixed"
    ADAPTIVE = "adaptive"


class OffPolicyCorrection(StrEnum):
    """What is done about tokens that the engine sampled under slightly other probabilities than the trainer's."""

    NONE = "none"
    TIS = "tis"
    DECOUPLED = "decoupled"
    ICEPOP = "icepop"


class KlControlSettings(Section):
    type: KlControl = KlControl.FIXED
    kl_coef: float = Field(0.001, ge=0, allow_inf_nan=False, description="beta, or what it starts from")
    target_kl: float = Field(0.1, gt=0, description="adaptive: mean KL of a trajectory that beta is steered to")
    horizon: int = Field(10000, ge=1, description="adaptive: trajectories over which beta moves by up to a fifth")


class CorrectionSettings(Section):
    mode: OffPolicyCorrection = Field(
        OffPolicyCorrection.TIS,
        description="weight of a token by its trainer-to-engine ratio: none; tis: cut off at rollout_is_threshold; "
        "decoupled: the ratio itself; icepop: 0 outside icepop_low to icepop_high",
    )
    rollout_is_threshold: float = Field(2.0, gt=1)
    icepop_low: float = Field(0.5, gt=0, le=1)
    icepop_high: float = Field(5.0, ge=1, allow_inf_nan=False)


class ProbePenaltySettings(Section):
    """What a probe of training's own trajectories takes from their advantages; it costs a probe each, every step."""

    coef: float = Field(0.0, ge=0, allow_inf_nan=False, description="times the overconfidence; 0 = no probes")
    trajectories_per_group: int = Field(1, ge=1, description="the first ones of each group are probed")
    points: int = Field(10, ge=1, description="truncations beside the empty thought")
    samples: int = Field(10, ge=1, description="answers at each")
    timeout_s: float = Field(120.0, gt=0, description="of all probes of a step; those that are missing then are left")


class AlgorithmSettings(Section):
    adv_estimator: AdvantageEstimator = AdvantageEstimator.GRPO
    norm_adv_by_std_in_grpo: bool = Field(True, description="false = Dr. GRPO's advantage; multi-turn GRPO too")
    turn_weight: float = Field(0.5, ge=0, allow_inf_nan=False, description="multi-turn GRPO: of the turns' part")
    gamma: float = Field(1.0, ge=0, le=1, description="discount of a token: gae, reinforce_plus_plus")
    lam: float = Field(1.0, ge=0, le=1, description="gae")
    state_masking: bool = Field(True, description="train on the model's own tokens only; false = observations too")
    reward_placement: RewardPlacement = Field(
        RewardPlacement.AUTO,
        description="of scores with turns; auto: turn_proportional where the KL is in the reward but for gae, "
        "else final_token_only",
    )
    filter_groups: bool = Field(False, description="leave out groups whose rewards are all equal")
    use_kl_in_reward: bool = False
    kl_penalty: str = Field("kl", pattern=KL_KINDS, description="kind of the KL in the reward")
    kl_ctrl: KlControlSettings = KlControlSettings()
    rollout_correction: CorrectionSettings = CorrectionSettings()
    probe_penalty: ProbePenaltySettings = ProbePenaltySettings()

    @property
    def placement(self) -> RewardPlacement:
        """Where scores with turns land, `auto` resolved."""
        if self.reward_placement is not RewardPlacement.AUTO:
            return self.reward_placement
        spread = self.use_kl_in_reward and self.adv_estimator is not AdvantageEstimator.GAE
        return RewardPlacement.TURN_PROPORTIONAL if spread else RewardPlacement.FINAL_TOKEN_ONLY

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmSettings:
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
