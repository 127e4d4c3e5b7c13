"""Importance weights of tokens in the actor's loss, for the difference between the engine's policy and the trainer's.

Engine and trainer give different probabilities to the same token: the engine samples in another precision and with
other kernels, and its weights can be some versions older. The gradient of tokens sampled by one policy and trained
under another is biased without a correction. The ratio is p_trainer / p_engine, with p_trainer of the policy that
the step starts from. By mode:

| none      | 1                                                                                                    |
| tis       | min(ratio, cap): truncated importance sampling (Yao et al. 2025, "Your efficient RL framework        |
|           | secretly brings you off-policy training")                                                            |
| decoupled | ratio: decoupled PPO (Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298): the engine is the   |
|           | behaviour policy, clipping stays around the trainer's proximal policy                                |
| icepop    | ratio within [low, high], 0 outside: IcePop (Zhao et al. 2025, "Small leak can sink a great ship")   |
"""

from __future__ import annotations

import torch

from forage_runtime.settings import CorrectionSettings

_MAX_LOG_RATIO = 20.0


def importance_weights(
    trainer: torch.Tensor, engine: torch.Tensor, state: torch.Tensor, settings: CorrectionSettings
) -> torch.Tensor:
    """Compute the weight of each token, shaped as the log-probabilities; 1 on tokens that the engine did not sample.

    Args:
        trainer, engine: log-probabilities of the same tokens, of any one shape.
        state: 1 where the engine sampled the token; it has no log-probability of the others.
    """
    ratio = (trainer - engine).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    match settings.mode:
        case "none":
            weights = torch.ones_like(ratio)
        case "tis":
            weights = ratio.clamp(max=settings.rollout_is_threshold)
        case "decoupled":
            weights = ratio
        case "icepop":
            low, high = settings.icepop
            weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return torch.where(state.bool(), weights, 1.0)


def compute_correction_metrics(
    trainer: torch.Tensor, engine: torch.Tensor, state: torch.Tensor, settings: CorrectionSettings
) -> dict[str, float]:
    """Compute metrics of the weights over state tokens: is_mean, is_max, is_min, is_masked, is_cut.

    is_masked: share of tokens with weight 0; is_cut: share of tokens whose ratio was truncated at the threshold.

    Args:
        trainer, engine, state: (rows, tokens), as `importance_weights`.
    """
    weights = importance_weights(trainer, engine, state, settings)[state.bool()]
    ratio = (trainer - engine)[state.bool()].exp()
    cut = ratio > settings.rollout_is_threshold if settings.mode == "tis" else torch.zeros(1)
    return {
        "is_mean": float(weights.mean()),
        "is_max": float(weights.max()),
        "is_min": float(weights.min()),
        "is_masked": float((weights == 0).float().mean()),
        "is_cut": float(cut.float().mean()),
    }
