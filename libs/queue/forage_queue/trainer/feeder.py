"""Which questions are issued: their order in training, and at most as many prompts as may be outstanding."""

from __future__ import annotations

import collections
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter, Gauge

from forage_proto.v1.trajectory_pb2 import Prompt, Purpose, Sampling, Status
from forage_queue.streams.client import StreamClient
from forage_queue.trainer import spans
from forage_queue.trainer.slots import SLOTS, ConsumedSlots, Slot
from forage_records.questions import Question, Questions, check_batch_size
from forage_runtime.errors import SettingsError
from forage_runtime.files.template_values import build_template_values
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import Settings
from forage_runtime.telemetry.label_names import LabelNames
from forage_runtime.telemetry.logs import get_logger
from forage_trajectory.trajectory import Group

QUESTIONS = Gauge("forage_trainer_questions", "Questions read", ["split", "data_source", "fate"])
SOURCES = LabelNames()
"""Data sources as labels: they are read from files, in which there may be any number of them."""

_MIXTURE = 1
_REFILL = "r"
ISSUED = Counter("forage_trainer_prompts_issued_total", "Prompts put on the stream", ["purpose"])
MAX_REPEATS = 10
"""Attempts of one position that a repeatable run issues again because of failures."""
MAX_STALENESS = Gauge("forage_trainer_max_staleness", "Policy versions that may lie between sampling and training")


def report_questions(split: str, questions: Questions) -> None:
    """Report in log and metrics which questions were read, which were filtered because their prompt is too long, and
    which accepted answers match nothing."""
    kept = collections.Counter(row.data_source for row in questions.rows)
    for fate, counts in (("kept", kept), ("filtered", questions.filtered)):
        shown: collections.Counter[str] = collections.Counter()
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
            epoch, index = divmod(read[source], len(self._sources[source]))
            draws.append(_Draw(source, int(self._order(source, epoch)[index]), epoch))
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


def sampling_seed(run_seed: int, batch: int, position: int, refill: int) -> int:
    """A seed of 48 bits for a question at this position; never 0, which would mean unseeded.

    Of no attempt: a group that was lost, or sampled under an older policy, is sampled again as it would have been.
    """
    name = f"{run_seed}/{batch}/{position}/{refill}".encode()
    return 1 + int.from_bytes(hashlib.sha256(name).digest()[:6], "big")


def has_outage(group: Group) -> bool:
    """Whether a trajectory has a failure that may not come again: a service, or a shard of one, was down."""
    outages = (Status.STATUS_TIMEOUT, Status.STATUS_INTERNAL)
    return any(
        t.status in outages or t.score.status in outages or any(turn.partial_retrieval for turn in t.turns)
        for t in group.trajectories
    )


class Feeder:
    """Issues batch b once version b - 1 - max_staleness exists.

    With trainer.batching=strict batch b is trained on by version b - 1 and its prompts name b - 1 - max_staleness as
    their lowest version, so no token exceeds the bound. The batcher checks that once more before it trains.

    settled: the slots that need no group any more, which it never issues.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        batches: Batches,
        retry: RedisRetry,
        has_equal_rewards: Callable[[Group], bool],
    ) -> None:
        """
        Args:
            has_equal_rewards: whether a group gives no gradient because its rewards are all equal.
        """
        self._settings = settings
        self._has_equal_rewards = has_equal_rewards
        self._template = build_template_values(settings)
        MAX_STALENESS.set(settings.trainer.max_staleness)
        self._streams = streams
        self._batches = batches
        self.settled = ConsumedSlots(batches.batch_size)
        self._retry = retry
        self._next: int | None = None
        self._shift = 0
        self._version = 0

    def align(self, consumed: int) -> None:
        """Find by how much the batch whose prompts a step after `consumed` needs differs from the step's number.

        Not at all, except with trainer.batching=ready where earlier steps had another data.train_batch_size: they have
        settled more or fewer slots of the batches that are not over.
        """
        ahead = -(-self.settled.count_ahead() // self._batches.batch_size)
        self._shift = self.settled.floor + ahead - consumed

    def issue_up_to_bound(self, version: int) -> Sequence[int]:
        """Issue all batches that may be outstanding at policy `version`; returns their numbers.

        A restarted trainer issues the batches after `version` again; Redis ignores prompts that it has seen, so
        each is on the stream once.
        """
        trainer = self._settings.trainer
        self._version = version
        last = min(version + 1 + trainer.max_staleness, trainer.total_training_steps) + self._shift
        first = self._next
        if first is None:  # with strict batching a version has consumed as many batches
            first = 1 + (self.settled.floor if trainer.batching == "ready" else version)
        issued = range(first, last + 1)
        for batch in issued:
            for position in range(self._batches.batch_size):
                if (batch, position) not in self.settled:
                    self.issue(batch, position, attempt=0, version=version)
        self._next = max(first, last + 1)
        return issued

    @property
    def parts(self) -> dict[str, ConsumedSlots]:
        """What a checkpoint must hold to go on from: nothing with strict batching, where its step says it all."""
        return {SLOTS: self.settled} if self._settings.trainer.batching == "ready" else {}

    def list_open(self) -> list[Slot]:
        """List the slots that were issued and are not settled."""
        return [] if self._next is None else list(self.settled.list_open(self._next - 1))

    def reissue(self, group: Group, version: int = 0) -> None:
        """Issue the question of a group again, to be sampled under this and the current policy version or later."""
        self.issue_again(group.batch, group.position, group.attempt + 1, refill_number(group.group_uid), version)

    def refill(self, group: Group) -> bool:
        """Issue another question at the position of a group whose rewards are all equal. False: keep the group."""
        refill = refill_number(group.group_uid) + 1
        if refill > self._settings.trainer.max_refills or not self._has_equal_rewards(group):
            return False
        self.issue_again(group.batch, group.position, group.attempt + 1, refill)
        return True

    def repeat(self, group: Group) -> bool:
        """Issue the question of a group with failures again, in a repeatable run: without them it has other samples.

        False: keep the group, since nothing failed, or it fails again and again.
        """
        settings, refill = self._settings, refill_number(group.group_uid)
        if not settings.run.repeatable or group.attempt - refill >= MAX_REPEATS or not has_outage(group):
            return False
        self.issue_again(group.batch, group.position, group.attempt + 1, refill)
        return True

    def find_latest(self, slots: Sequence[Slot]) -> tuple[str, ...]:
        """Find the uids of the questions that were issued last at these slots."""
        latest: dict[Slot, str] = {}
        for batch in sorted({batch for batch, _ in slots}):
            issues = self._retry(partial(self._streams.read_issues, self._streams.trajectories, batch))
            latest |= {(batch, position): uid for (position, _), uid in sorted(issues.items())}
        return tuple(latest.get(slot) or self._batches.group(*slot)[0] for slot in slots)

    def issue_again(self, batch: int, position: int, attempt: int, refill: int = 0, version: int = 0) -> None:
        """Issue a further attempt at a position, to be sampled under this and the current policy version or later."""
        # Groups of batches ahead arrive early; they must not ask for a version older than their own batch allows.
        version = max(version, self._version, batch - self._shift - 1 - self._settings.trainer.max_staleness)
        self.issue(batch, position, attempt, version, refill)

    def issue(self, batch: int, position: int, attempt: int, version: int, refill: int = 0) -> None:
        """Issue one group of a batch, to be sampled under `version` or later.

        Args:
            refill: which question of this position, see `Batches.group`.
        """
        uid, question = self._batches.group(batch, position, refill)
        settings = self._settings
        prompt = Prompt(
            run_id=settings.run.id,
            group_uid=uid,
            data_source=question.data_source,
            messages=question.messages,
            ground_truth=question.ground_truth,
            samples=settings.rollout.n,
            sampling=Sampling(
                temperature=settings.rollout.temperature,
                top_p=settings.rollout.top_p,
                top_k=max(0, settings.rollout.top_k),
                seed=sampling_seed(settings.run.seed, batch, position, refill),
            ),
            purpose=Purpose.PURPOSE_TRAIN,
            batch=batch,
            position=position,
            min_policy_version=version,
            attempt=attempt,
            issued_unix_ms=int(time.time() * 1000),
            reply_stream=self._streams.trajectories,
            template=self._template,
        )
        with spans.trace_issue(prompt):
            issued = self._retry(lambda: self._streams.issue(prompt))
        if issued:
            ISSUED.labels("train").inc()
            get_logger().debug("prompt_issued", group=uid, batch=batch, position=position, attempt=attempt)
