"""A policy loss: REINFORCE, with the ratio to the policy of the step's begin clipped from above."""

import torch
from verl.trainer.ppo.core_algos import agg_loss


def clipped_reinforce(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
):
    """
    old_log_prob, log_prob, advantages, response_mask, rollout_is_weights: (rows, tokens), of one micro-batch.
    Returns the loss, a scalar with a gradient, and metrics if there are any.
    """
    ratio = torch.exp(log_prob.detach() - old_log_prob).clamp(max=1 + config.clip_ratio_high)
    losses = -advantages * ratio * log_prob
    if rollout_is_weights is not None:  # trainer against engine
        losses = losses * rollout_is_weights
    # `global_batch_info` is of the whole update, so that the loss does not depend on how it was cut into micro-batches.
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/ratio_mean": float(ratio[response_mask > 0].mean())}
