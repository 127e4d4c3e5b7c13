"""The order of the questions in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import Gauge

from forage_records.questions import Question, Questions, check_batch_size
from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings
from forage_runtime.telemetry.label_names import LabelNames
from forage_runtime.telemetry.logs import get_logger

QUESTIONS = Gauge("forage_trainer_questions", "Questions read", ["split", "data_source", "fate"])
SOURCES = LabelNames()
"""Data sources as labels: they are read from files, in which there may be any number of them."""

_MIXTURE = 1
_REFILL = "r"


def report_questions(split: str, questions: Questions) -> None:
    """Report in log and metrics which questions were read, which were filtered because their prompt is too long, and
    which accepted answers match nothing."""
    kept = Counter(row.data_source for row in questions.rows)
    for fate, counts in (("kept", kept), ("filtered", questions.filtered)):
        shown: Counter[str] = Counter()
        for source, count in counts.items():
            shown[SOURCES.name(source)] += count
        for source, count in shown.items():
            QUESTIONS.labels(split, source, fate).set(count)
    get_logger().info("questions_read", split=split, kept=dict(kept), filtered=dict(questions.filtered))
    if wordless := questions.describe_wordless():
        get_logger().warning("answers_match_nothing", split=split, detail=wordless)


Sampler = Callable[[Sequence[Question], int, int], Sequence[int]]
"""(questions of a source, epoch from 0, seed) → their indexes in the order of this epoch, each once.

Pure: a resumed run asks again."""


def make_batches(questions: Sequence[Question], settings: Settings, sampler: Sampler | None = None) -> Batches:
    """Order the questions as the settings say.

    Args:
        sampler: see `data.sampler`; None: a new permutation each epoch.

    Raises:
        DataError: too few questions.
    """
    data = settings.data
    return Batches(questions, data.train_batch_size, settings.run.seed, data.train_weights, sampler)


@dataclass(frozen=True)
class _Draw:
    """A question's index within its source, in the source's `epoch`-th pass."""

    source: int
    index: int
    epoch: int


class Batches:
    """Batch number → questions, a pure function of (questions, batch size, seed, weights). Batches count from 1.

    Pure, so that a resumed run issues the questions that an uninterrupted one would, without any saved cursor.

    Without weights all questions are one source. With weights each file is a source, and every position of a batch
    belongs to a source drawn by weight. A source yields its questions in a new permutation each epoch; an epoch may
    end within a batch.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        batch_size: int,
        seed: int,
        weights: Sequence[float] = (),
        sampler: Sampler | None = None,
    ) -> None:
        """
        Args:
            weights: relative weight of each file (`Question.file`).

        Raises:
            DataError: fewer questions than a batch has, or none in a file that has a weight.
        """
        check_batch_size(questions, batch_size, weights)
        self.batch_size = batch_size
        self._seed = seed
        self._shares: npt.NDArray[np.double] = np.cumsum(weights) / np.sum(weights) if weights else np.ones(1)
        self._sources = (
            [[q for q in questions if q.file == file] for file in range(len(weights))] if weights else [list(questions)]
        )
        self._sampler = sampler
        self._order = lru_cache(maxsize=16)(self._find_order)
        self._draws = lru_cache(maxsize=8)(self._draw)

    def group(self, batch: int, position: int, refill: int = 0) -> tuple[str, Question]:
        """(group uid, question) of one position.

        Args:
            refill: 0 for the first question of the position; n for the n-th that replaces it, of the same source.
        """
        draw = self._draws(batch)[position]
        rows = self._sources[draw.source]
        if not refill:
            return rows[draw.index].uid(draw.epoch), rows[draw.index]
        others = _permutation(max(1, len(rows) - 1), self._seed, batch, position)
        question = rows[(draw.index + 1 + int(others[(refill - 1) % len(others)])) % len(rows)]
        return question.uid(f"{_REFILL}{batch}.{position}.{refill}"), question

    def _find_order(self, source: int, epoch: int) -> npt.NDArray[np.int64]:
        rows = self._sources[source]
        if self._sampler is None:
            return _permutation(len(rows), self._seed, epoch, source)
        return _check_order(self._sampler(rows, epoch, self._seed), len(rows))

    def _draw(self, batch: int) -> list[_Draw]:
        begin, end = (batch - 1) * self.batch_size, batch * self.batch_size
        # The source of every position since the first batch: the counts say how far each source has been read.
        chosen: npt.NDArray[np.intp] = np.zeros(end, dtype=np.intp)
        if len(self._sources) > 1:
            uniform = np.random.default_rng([self._seed, 0, 0, _MIXTURE]).random(end)
            chosen = np.searchsorted(self._shares, uniform, side="right").astype(np.intp)
        read = np.bincount(chosen[:begin], minlength=len(self._sources)).tolist()
        draws = []
        for source in chosen[begin:].tolist():
            epoch, place = divmod(read[source], len(self._sources[source]))
            draws.append(_Draw(source, int(self._order(source, epoch)[place]), epoch))
            read[source] += 1
        return draws


def _check_order(order: object, count: int) -> npt.NDArray[np.int64]:
    """Return an order that a sampler gave.

    Raises:
        SettingsError: it is not each index once.
    """
    found: npt.NDArray[Any] = np.asarray(order)
    if found.shape == (count,) and found.dtype.kind in "iu" and (np.sort(found) == np.arange(count)).all():
        return found.astype(np.int64)
    what = f"{found.dtype} of shape {found.shape}" if found.shape != (count,) else "other numbers, or one twice"
    raise SettingsError(f"data.sampler gave {what}: expected the indexes 0 to {count - 1}, each once")


def refill_number(uid: str) -> int:
    """The refill number in a group's uid; 0 for the first question of a position."""
    last = uid.rpartition("/")[2]
    return int(last.rpartition(".")[2]) if last.startswith(_REFILL) else 0


@lru_cache(maxsize=16)
def _permutation(count: int, *seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(count)
