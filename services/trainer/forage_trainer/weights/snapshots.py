"""What of the trained policy is published: a copy of its weights, and its log-probabilities of a few tokens.

By these an engine can tell whether it serves what was trained (`rollout.weights.canary`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from forage_proto.v1.trajectory_pb2 import Canary
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.data.tensors import Rows
from forage_trainer.weights import dtype
from forage_trajectory.trajectory import Columns, Group
from forage_weights.announcement import CANARY_ROWS, CANARY_TOKENS
from forage_weights.trainer.model_files import Adapter

_LEAST = 2


class Worker(dtype.Worker, Protocol):
    """What holds the policy, and computes with it. dtype: what it computes in, as PyTorch names it."""

    @property
    def dtype(self) -> str: ...

    def log_probs(self, batch: Rows) -> torch.Tensor: ...


class Snapshots:
    """Takes snapshots of a worker's policy.

    Args:
        read_dtype: what the engines say that they compute in; see `dtype.choose_dtype`.
        hold: entered while the worker is asked: it may share its GPUs.
        openings: tokens of some prompts, to make rows of; none: no log-probabilities are published.
        pad_id: token id for padding inside the worker.
    """

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        read_dtype: Callable[[], str],
        hold: Callable[[], AbstractContextManager[Any]],
        openings: Sequence[Sequence[int]],
        pad_id: int,
    ) -> None:
        self._settings, self._worker, self._read_dtype, self._hold = settings, worker, read_dtype, hold
        # The ends of prompts: their beginnings are the same in all.
        self._tokens = [[*opening[-CANARY_TOKENS:]] for opening in openings[:CANARY_ROWS] if len(opening) >= _LEAST]
        self._pad_id = pad_id
        self._rows = self._build_rows()
        self._has_turn = False

    def add_turn(self, groups: Iterable[Group]) -> None:
        """Let the last row be a turn that the policy has sampled, the first one that there is."""
        if self._has_turn or self._rows is None:
            return
        for trajectory in (one for group in groups for one in group.trajectories):
            if trajectory.counts.whole and (turn := _find_turn(trajectory.columns.load())):
                self._tokens, self._has_turn = [*self._tokens[: CANARY_ROWS - 1], turn], True
                self._rows = self._build_rows()
                return

    def take(self) -> tuple[Mapping[str, torch.Tensor] | Adapter, Canary | None]:
        """Copy what is to be published, as `dtype.copy_weights` does, and score the rows under it."""
        with self._hold():
            return dtype.copy_weights(self._worker, self._settings, self._read_dtype()), self._score()

    def _score(self) -> Canary | None:
        """None without rows, and where a log-probability is not finite: no engine could be measured by it."""
        if self._rows is None:
            return None
        scores = self._worker.log_probs(self._rows)
        canary = Canary(dtype=self._worker.dtype)
        for tokens, scored in zip(self._tokens, scores.tolist(), strict=True):
            canary.rows.add(token_ids=tokens, logprobs=scored[: len(tokens) - 1])
        if not all(math.isfinite(one) for row in canary.rows for one in row.logprobs):
            get_logger().warning("canary_left_out", reason="the policy's log-probabilities are not finite")
            return None
        return canary

    def _build_rows(self) -> Rows | None:
        if not self._tokens:
            return None
        sizes = [len(tokens) - 1 for tokens in self._tokens]
        return Rows(
            columns=[_make_columns(tokens) for tokens in self._tokens],
            prompts=[1] * len(sizes),
            responses=sizes,
            temperatures=[1.0] * len(sizes),
            positions=[*range(len(sizes))],
            pad_id=self._pad_id,
            state_masking=True,
        )


def _make_columns(tokens: Sequence[int]) -> Columns:
    """A row whose first token is its prompt."""
    runs = np.array([[len(tokens) - 1, 1, 1]], np.int32)
    return Columns(np.array(tokens, np.int32), runs, np.zeros(len(tokens) - 1, np.float32))


def _find_turn(columns: Columns) -> list[int]:
    """The first tokens of the first run that the policy sampled and that has several; empty: there is none."""
    end = len(columns.token_ids) - int(columns.runs[:, 0].sum())
    for length, sampled, _ in columns.runs.tolist():
        begin, end = end, end + length
        if sampled and length >= _LEAST:
            tokens: list[int] = columns.token_ids[begin:end][:CANARY_TOKENS].tolist()
            return tokens
    return []
