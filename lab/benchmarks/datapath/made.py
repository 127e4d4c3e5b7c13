"""Made groups of search trajectories, as they are on the stream."""

from __future__ import annotations

import numpy as np

from forage_proto.v1.trajectory_pb2 import PolicySegment, Role, Score, Span, Status, Trajectory, TrajectoryGroup
from forage_trajectory.codec import pack_group

DISTINCT = 4
"""Groups that are really made; the others are copies at other positions, so that making them takes no minutes."""
PROMPT_TOKENS, SAMPLED_SHARE, TURNS = 200, 0.4, 8
_VOCABULARY = 50_000


def make_groups(groups: int, samples: int, tokens: int) -> tuple[list[bytes], list[bytes]]:
    """Make groups of trajectories with so many tokens: (plain messages, packed ones), both encoded."""
    chance = np.random.default_rng(tokens)
    made = [_make_group(chance, samples, tokens) for _ in range(min(groups, DISTINCT))]
    plain, packed = [], []
    packs = [pack_group(one) for one in made]
    for position in range(groups):
        group, pack = made[position % len(made)], packs[position % len(made)]
        group.position = pack.head.position = position
        plain.append(group.SerializeToString())
        packed.append(pack.SerializeToString())
    return plain, packed


def _make_group(chance: np.random.Generator, samples: int, tokens: int) -> TrajectoryGroup:
    uid = f"made/{chance.integers(1 << 30)}"
    rows = [_make_trajectory(chance, uid, sample, tokens) for sample in range(samples)]
    return TrajectoryGroup(run_id="bench", group_uid=uid, batch=1, trajectories=rows)


def _make_trajectory(chance: np.random.Generator, uid: str, sample: int, tokens: int) -> Trajectory:
    """Turns of the policy with observations between them; lengths differ by up to a fifth."""
    response = int(tokens * chance.uniform(0.8, 1.0)) - PROMPT_TOKENS
    turn = response // TURNS
    own = int(turn * SAMPLED_SHARE)
    mask, turns, spans, begin = [], [], [], PROMPT_TOKENS
    for number in range(1, TURNS + 1):
        for role, length, value in ((Role.ROLE_MODEL, own, number), (Role.ROLE_ENV, turn - own, -1)):
            mask += [int(value > 0)] * length
            turns += [value] * length
            spans.append(Span(role=role, begin=begin, end=begin + length))
            begin += length
    state = np.array(mask)
    return Trajectory(
        id=f"bench/{uid}/{sample}",
        group_uid=uid,
        sample=sample,
        data_source="made",
        token_ids=chance.zipf(1.3, PROMPT_TOKENS + len(mask)).clip(3, _VOCABULARY).tolist(),
        prompt_length=PROMPT_TOKENS,
        loss_mask=mask,
        turn_ids=turns,
        logprobs=(-chance.exponential(0.7, len(mask)) * state).astype(np.float32).tolist(),
        segments=[PolicySegment(version=0, epoch=1, begin=0, end=len(mask))],
        spans=spans,
        score=Score(status=Status.STATUS_OK, total=float(sample % 2)),
        status=Status.STATUS_OK,
        finished=True,
    )
