"""The order in which training meets its questions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forage_common.errors import DataError
from forage_common.questions import Question


@dataclass(frozen=True)
class Batches:
    """Batch number → questions, a pure function of (questions, batch size, seed). Batches count from 1.

    Each epoch is a permutation of its own; questions left over at its end (fewer than a batch) wait for the next one.
    """

    questions: tuple[Question, ...]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.questions) < self.batch_size:
            raise DataError(
                f"data.train_files hold {len(self.questions)} usable questions, fewer than data.train_batch_size = "
                f"{self.batch_size}: add files or lower it"
            )

    def groups(self, batch: int) -> list[tuple[str, Question]]:
        """(group uid, question) by position."""
        per_epoch = len(self.questions) // self.batch_size
        epoch, place = divmod(batch - 1, per_epoch)
        order = _permutation(len(self.questions), self.seed, epoch)
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
        return [(self.questions[i].uid(epoch), self.questions[i]) for i in chosen]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    return [int(i) for i in np.random.default_rng([seed, epoch]).permutation(count)]
