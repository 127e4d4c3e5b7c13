"""Multi-turn GRPO: a turn's reward is credited to its own tokens, the trajectory's reward to all of its tokens.

After KG-R1's multi-turn advantage (github.com/Jinyeop3110/KG-R1), with the mask applied and without the components
that serve only logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from forage_trainer.algorithms.estimators.groups import normalize_in_groups


def grpo_multiturn(
    turn_rewards: Sequence[Mapping[int, float]],
    whole_rewards: torch.Tensor,
    turn_ids: torch.Tensor,
    mask: torch.Tensor,
    uids: Sequence[str],
    turn_weight: float = 0.5,
    norm_by_std: bool = True,
) -> torch.Tensor:
    """Compute advantages: turn_weight * turn part + global part, (rows, tokens), float32; the returns are the same.

    Turn part: the rewards of all turns of all rows of a uid are normalized together; each goes to the tokens of its
    turn. Global part: `whole_rewards` normalized within the uid, on all tokens with a turn id above 0.

    Args:
        turn_rewards: rewards of each row's turns, by turn id.
        whole_rewards: (rows,), the rest of the trajectory's reward.
        turn_ids: (rows, tokens), of the turn that sampled a token; -1 on observations.
        mask: (rows, tokens), 1 on tokens that are trained on.
        uids: group of each row.
        norm_by_std: False leaves out both divisions.
    """
    turns_of_rows = [(row, turn, reward) for row, turns in enumerate(turn_rewards) for turn, reward in turns.items()]
    rewards = torch.tensor([reward for _, _, reward in turns_of_rows], dtype=torch.double)
    normalized = normalize_in_groups(rewards, [uids[row] for row, _, _ in turns_of_rows], norm_by_std)
    advantages = torch.zeros(mask.shape, dtype=torch.double)
    for (row, turn, _), value in zip(turns_of_rows, normalized.tolist(), strict=True):
        advantages[row, turn_ids[row] == turn] = turn_weight * value
    advantages += normalize_in_groups(whole_rewards, uids, norm_by_std).unsqueeze(-1) * (turn_ids > 0)
    return (advantages * mask).float()
