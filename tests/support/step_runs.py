"""A run with step files, for tests of what shows trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    Component,
    Document,
    GroundTruth,
    PolicySegment,
    Role,
    Score,
    Span,
    Status,
    Trajectory,
    Turn,
)
from forage_records.step_file import Fate, GroupFate, StepRow, step_file_path, write_step

END = "<|im_end|>"


def build_step_row(step: int, uid: str = "nq/train/1/0", sample: int = 0, **changes: Any) -> StepRow:
    """A search of two tokens, an observation of two, and an answer of two.

    Args:
        changes: question, text (of the observation), reward (None: it failed), right, versions, advantages, trained.
    """
    reward: float | None = changes.get("reward", 1.0)
    question, text = changes.get("question", "Who is it?"), changes.get("text", "nobody knows")
    first, last = changes.get("versions", (step - 1, step - 1))
    status = Status.STATUS_OK if reward is not None else Status.STATUS_TIMEOUT
    detail = "" if reward is not None else "the retriever did not answer"
    score = Score(
        status=status, total=reward or 0.0, reward="made", components=[Component(name="em", raw=1, weighted=1)]
    )
    trajectory = Trajectory(
        id=f"one/{uid}/{sample}",
        group_uid=uid,
        sample=sample,
        data_source=uid.split("/")[0],
        token_ids=range(7),
        prompt_length=1,
        loss_mask=[1, 1, 0, 0, 1, 1],
        turn_ids=[1, 1, -1, -1, 2, 2],
        logprobs=[-1.0, -1.0, 0.0, 0.0, -1.0, -1.0],
        segments=[PolicySegment(version=first, begin=0, end=4), PolicySegment(version=last, begin=4, end=6)],
        spans=[
            Span(role=Role.ROLE_PROMPT, begin=0, end=1, text=f"Answer. Question: {question}{END}"),
            Span(role=Role.ROLE_MODEL, begin=1, end=3, text="<search> him </search>"),
            Span(role=Role.ROLE_ENV, begin=3, end=5, text=f"<information>{text}</information>"),
            Span(role=Role.ROLE_MODEL, begin=5, end=7, text="<answer> Ann </answer>"),
        ],
        turns=[
            Turn(
                index=1,
                action=ActionKind.ACTION_KIND_SEARCH,
                content="him",
                executed=changes.get("searches", 1) > 0,
                documents=[
                    Document(id="d1", contents='"Ann"\nAnn is known.', score=2.5),
                    Document(id="d2", contents='"x"'),
                ],
            ),
            Turn(index=2, action=ActionKind.ACTION_KIND_ANSWER, content="Ann"),
        ],
        score=score,
        validation_score=Score(status=status, total=float(changes.get("right", True)), reward="exact_match"),
        ground_truth=GroundTruth(targets=["Ann"]),
        finished=True,
        truncated=changes.get("truncated", False),
        valid_searches=changes.get("searches", 1),
        status=status,
        status_detail=detail,
        trace_id=changes.get("trace_id", ""),
    )
    trained = changes.get("trained", reward is not None)
    if not trained:
        return StepRow(trajectory, step, step - 1, False, reason=f"failed: {detail}" if detail else "its group is dead")
    return StepRow(
        trajectory,
        step,
        step - 1,
        True,
        loss_mask=[1, 1, 0, 0, 1, 1],
        advantages=changes.get("advantages", [0.5, 0.5, 0.0, 0.0, 0.5, 0.5]),
        log_probs=[-1.0, -1.25, -5.0, -5.0, -1.0, -1.0],
        engine_log_probs=[-1.0, -1.0, 0.0, 0.0, -1.0, -1.0],
        reference_log_probs=[-1.0, -1.25, -5.0, -5.0, -1.0, -2.0],
        entropies=[0.5] * 6,
    )


def write_steps(run: Path, rows: Sequence[StepRow], dropped: Sequence[str] = ()) -> None:
    """Write one file for each step of the rows; `dropped` are uids of groups that no step used."""
    for step in sorted({row.step for row in rows}):
        own = [row for row in rows if row.step == step]
        uids = dict.fromkeys(row.trajectory.group_uid for row in own)
        fates = [GroupFate(uid, place, 0, Fate.TRAINED) for place, uid in enumerate(uids)]
        fates += [GroupFate(uid, len(uids), 0, Fate.DROPPED, "it came too late") for uid in dropped]
        write_step(step_file_path(run, step), END, own, fates)
