"""An estimator: the reward of a row over the best other row of its group, on every token that the policy sampled."""

import torch


def beat_the_best(rewards, settings):
    """
    rewards.token_rewards, rewards.mask: (rows, tokens); rewards.uids: the group of each row.
    Returns advantages, (rows, tokens); or two such tensors, advantages and returns.
    """
    scores = (rewards.token_rewards * rewards.mask).sum(-1)
    advantages = torch.zeros_like(scores)
    for row, uid in enumerate(rewards.uids):
        others = [float(scores[i]) for i, other in enumerate(rewards.uids) if other == uid and i != row]
        advantages[row] = scores[row] - max(others, default=0.0)
    return advantages[:, None] * rewards.mask
