"""One step's trajectories with the turns and lengths of `lab/benchmarks/rollout/plan.py`, as tensors."""

from __future__ import annotations

import random

import plan

from forage_proto.v1.trajectory_pb2 import PolicySegment, Score, Status, Trajectory, TrajectoryGroup
from forage_runtime.settings import AlgorithmSettings
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories
from forage_trajectory.codec import decode_group, pack_group

SAMPLES = 8
PROMPT_TOKENS = OBSERVATION_TOKENS = 100
"""Approximate tokens of plan.py's texts with the tiny policy's tokenizer."""
_SPREAD = 10
_FIRST_ID, _VOCABULARY = 3, 1024
_LOG_PROB = -6.9
"""Log-probability of a token drawn from so many; the engine's differ slightly."""


def tensors(groups: int, algorithm: AlgorithmSettings, samples: int = SAMPLES) -> StepTensors:
    """`groups` x `samples` trajectories, the same in every run; every other one has a reward of 1."""
    result = [
        decode_group(
            pack_group(
                TrajectoryGroup(
                    group_uid=uid,
                    position=position,
                    trajectories=[_trajectory(plan.Row(uid, sample)) for sample in range(samples)],
                )
            )
        )
        for position, uid in enumerate(plan.list_uids(groups, 0))
    ]
    batch = build_step_tensors(select_trajectories(result, algorithm), version=0, epoch=1, pad_id=0, settings=algorithm)
    assert batch is not None
    return batch


def _trajectory(row: plan.Row) -> Trajectory:
    chance = random.Random(row.build_query(0))
    mask: list[int] = []
    turns: list[int] = []
    for turn, tokens in enumerate(row.lengths, start=1):
        observed = chance.randint(OBSERVATION_TOKENS - _SPREAD, OBSERVATION_TOKENS + _SPREAD) if turn > 1 else 0
        mask += [0] * observed + [1] * tokens
        turns += [-1] * observed + [turn] * tokens
    prompt = random.Random(row.uid).randint(PROMPT_TOKENS - _SPREAD, PROMPT_TOKENS + _SPREAD)
    return Trajectory(
        id=row.build_query(0),
        group_uid=row.uid,
        sample=row.sample,
        data_source=plan.DATA_SOURCE,
        token_ids=[chance.randrange(_FIRST_ID, _VOCABULARY) for _ in range(prompt + len(mask))],
        prompt_length=prompt,
        loss_mask=mask,
        turn_ids=turns,
        logprobs=[chance.gauss(_LOG_PROB, 0.1) if own else 0.0 for own in mask],
        segments=[PolicySegment(version=0, epoch=1, begin=0, end=len(mask))],
        score=Score(status=Status.STATUS_OK, total=float(row.sample % 2)),
        status=Status.STATUS_OK,
        finished=True,
    )
