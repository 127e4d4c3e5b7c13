"""Stored trajectories with their scores, for replays."""

from __future__ import annotations

from typing import Any

from forage_proto.v1.trajectory_pb2 import (
    Component,
    GroundTruth,
    Role,
    Sampling,
    Score,
    Span,
    Status,
    Trajectory,
)


def build_stored(number: int = 0, **fields: Any) -> Trajectory:
    known: dict[str, Any] = {
        "id": f"run/world/test/{number}/0/3",
        "run_id": "run",
        "group_uid": f"world/test/{number}/0",
        "sample": 3,
        "data_source": "world",
        "token_ids": [1, 2, 10, 11, 90, 91, 12],
        "prompt_length": 2,
        "turn_ids": [1, 1, -1, -1, 2],
        "spans": [Span(role=Role.ROLE_MODEL, text="me")],
        "status": Status.STATUS_OK,
        "score": score(0.2, em=0.2, format=0.0),
        "validation_score": Score(status=Status.STATUS_OK, total=1.0),
        "ground_truth": GroundTruth(targets=["me"]),
        "sampling": Sampling(temperature=1.0, seed=40),
    }
    return Trajectory(**{**known, **fields})


def score(total: float, **components: float) -> Score:
    parts = [Component(name=name, raw=value, weighted=value) for name, value in components.items()]
    return Score(status=Status.STATUS_OK, total=total, components=parts, detail="because")
