"""Multi-turn GRPO: what a turn earned is credited to its own tokens, what the trajectory reached to all of them.

After KG-R1's multi-turn advantage (github.com/Jinyeop3110/KG-R1), with the mask applied and without the components
that are for logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from forage_trainer.algorithms.estimators.groups import normalised


def grpo_multiturn(
    turn_rewards: Sequence[Mapping[int, float]],
    whole_rewards: torch.Tensor,
    turn_ids: torch.Tensor,
    mask: torch.Tensor,
    uids: Sequence[str],
    turn_weight: float = 0.5,
    norm_by_std: bool = True,
) -> torch.Tensor:
    """turn_weight * turn part + global part, (rows, tokens), float32; the returns are the same.

    Turn part: the rewards of all turns of all rows of a uid are normalised together; each goes to the tokens of its
    turn. Global part: `whole_rewards` normalised within the uid, to all tokens with a turn id above 0.

    Args:
        turn_rewards: of each row, what its turns earned, by turn id.
        whole_rewards: (rows,), what the trajectory earned besides.
        turn_ids: (rows, tokens), of the turn that wrote a token; -1 on observations.
        mask: (rows, tokens), 1 on tokens that are trained on.
        uids: group of each row.
        norm_by_std: False leaves out both divisions.
    """
    places = [(row, turn, reward) for row, turns in enumerate(turn_rewards) for turn, reward in turns.items()]
    earned = torch.tensor([reward for _, _, reward in places], dtype=torch.double)
    pooled = normalised(earned, [uids[row] for row, _, _ in places], norm_by_std)
    advantages = torch.zeros(mask.shape, dtype=torch.double)
    for (row, turn, _), value in zip(places, pooled.tolist(), strict=True):
        advantages[row, turn_ids[row] == turn] = turn_weight * value
    advantages += normalised(whole_rewards, uids, norm_by_std).unsqueeze(-1) * (turn_ids > 0)
    return (advantages * mask).float()
