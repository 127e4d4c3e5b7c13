"""Rows of random tokens, and transformers' log-probabilities of them by plain forward passes. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from forage_proto.v1.trajectory_pb2 import Canary

Rows = Sequence[Sequence[int]]


def draw_rows(vocabulary: int, lengths: Sequence[int] = (56, 21)) -> list[list[int]]:
    """Draw rows of tokens; by default one is longer than the window of attention of the models of `model_families`."""
    source = random.Random(47)
    return [[source.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def score_rows(model: PreTrainedModel, rows: Rows) -> list[list[float]]:
    """Compute the log-probabilities of the rows' tokens but the first."""
    scores = []
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist())
    return scores


def build_canary(model: PreTrainedModel, rows: Rows) -> Canary:
    """Build the canary that a trainer in float32 gives with this model."""
    scored = zip(rows, score_rows(model, rows), strict=True)
    return Canary(rows=[Canary.Row(token_ids=row, logprobs=given) for row, given in scored], dtype="float32")
