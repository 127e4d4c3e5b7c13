"""Greedy evaluation of held-out questions, through the same streams and rollout service as training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Gauge

from forage_common.files.questions import Question
from forage_common.settings import Settings
from forage_common.streams.client import StreamClient
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy, Prompt, Purpose, Sampling, Trajectory
from forage_trainer.data import spans
from forage_trainer.data.arrivals import SILENCE_S, Arrivals, Entries
from forage_trainer.data.batcher import LOG_INTERVAL_S, BatchTimeoutError
from forage_trainer.data.feeder import ISSUED
from forage_trainer.files import write_json, write_text
from forage_trainer.reporting.progress import Phase, StateFile
from forage_trainer.validation.results import build_record, is_judged, list_sources, summarize
from forage_trainer.waiting import RedisRetry

RETRIES = 2
"""Times that a failed question is issued again before it counts as failed."""
_BLOCK_S = 1.0
_POLL_BLOCK_S = 0.001
EM = Gauge("forage_trainer_validation_em", "Exact match of a validation", ["label"])
SOURCE_EM = Gauge("forage_trainer_validation_source_em", "Exact match of the last validation", ["data_source"])


@dataclass
class _Evaluation:
    """An evaluation in progress. answers: by position; None where a question failed for good."""

    label: str
    policy: Policy
    stream: str
    arrivals: Arrivals
    began: float
    answers: dict[int, Trajectory | None] = field(default_factory=dict)


class Validation:
    """The evaluations of one run, each done once and written to `<run folder>/validation/`.

    After `begin`, `poll` collects answers while training continues, and `finish` waits for the rest.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        questions: Sequence[Question],
        state: StateFile,
        retry: RedisRetry,
        health: Health,
        on_silence: Callable[[], object] = lambda: None,
    ) -> None:
        self._settings = settings
        self._streams = streams
        self._questions = questions
        self._state = state
        self._retry = retry
        self._health = health
        self._on_silence = on_silence
        self._folder = settings.run.folder / "validation"
        self._open: _Evaluation | None = None
        self._restored: dict[str, Any] = {}

    def is_done(self, label: str, version: int) -> bool:
        """Whether the result of this evaluation of this version is on disk."""
        try:
            return bool(json.loads((self._folder / f"{label}.json").read_text())["version"] == version)
        except (OSError, ValueError, KeyError):
            return False

    def scores(self) -> dict[int, float]:
        """Policy version → mean exact match, of all evaluations whose result is on disk."""
        scores: dict[int, float] = {}
        for file in sorted(self._folder.glob("*.json")):
            try:
                result = json.loads(file.read_text())
                scores[int(result["version"])] = float(result["em"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                get_logger().warning("validation_without_score", file=str(file), reason=repr(error))
        return scores

    def begin(self, label: str, policy: Policy) -> None:
        """Issue every question once, to be answered greedily under `policy` or later, unless this evaluation is done.

        One may be open at a time.
        """
        stream = self._streams.key(f"validation-{label}")
        if self.is_done(label, policy.version):
            self._retry(lambda: self._streams.close_replies(stream, policy.version))
            return
        self._retry(lambda: self._streams.open_replies(stream, policy.version))
        arrivals = Arrivals(self._streams, stream, self._retry)
        self._open = _Evaluation(label, policy, stream, arrivals, time.monotonic())
        for position in range(len(self._questions)):
            self._issue(self._open, position, 0)
        # Redis ignores questions that an earlier process issued; their answers may have been claimed by it.
        self._accept(self._open, arrivals.reclaim())

    def poll(self) -> dict[str, Any] | None:
        """Claim the answers that have arrived; returns the result once complete, None before or if none is open."""
        if self._open is None:
            return None
        while entries := self._open.arrivals.claim(_POLL_BLOCK_S):
            self._accept(self._open, entries)
        return self._end(self._open) if len(self._open.answers) == len(self._questions) else None

    def finish(self) -> dict[str, Any] | None:
        """Wait for the missing answers; returns the result once it is written, None if no evaluation is open.

        Raises:
            BatchTimeoutError: nothing arrived for trainer.batch_timeout_s.
        """
        if self._open is None:
            return None
        self._collect(self._open)
        return self._end(self._open)

    @property
    def open_versions(self) -> set[int]:
        """Policy versions whose evaluation is in progress."""
        return set() if self._open is None else {self._open.policy.version}

    def state_dict(self) -> dict[str, Any]:
        """The open evaluation, for a checkpoint. Its questions and answers are in Redis."""
        if self._open is None:
            return {}
        policy = self._open.policy
        return {"label": self._open.label, "version": policy.version, "epoch": policy.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    def resume(self) -> None:
        """Open the evaluation that was open in the restored checkpoint."""
        if state := self._restored:
            self.begin(state["label"], Policy(version=state["version"], epoch=state["epoch"]))

    def _issue(self, evaluation: _Evaluation, position: int, attempt: int) -> None:
        policy = evaluation.policy
        question = self._questions[position]
        prompt = Prompt(
            run_id=self._settings.run.id,
            group_uid=question.uid(0),
            data_source=question.data_source,
            messages=question.messages,
            ground_truth=question.ground_truth,
            samples=1,
            sampling=Sampling(temperature=0.0),
            purpose=Purpose.PURPOSE_VALIDATION,
            batch=policy.version,
            position=position,
            min_policy_version=policy.version,
            attempt=attempt,
            issued_unix_ms=int(time.time() * 1000),
            reply_stream=evaluation.stream,
        )
        with spans.trace_issue(prompt):
            issued = self._retry(lambda: self._streams.issue(prompt))
        if issued:
            ISSUED.labels("validation").inc()

    def _collect(self, evaluation: _Evaluation) -> None:
        total = len(self._questions)
        arrived = logged = searched = time.monotonic()
        while True:
            self._state.set(Phase.VALIDATING, evaluation.label, len(evaluation.answers), total)
            if len(evaluation.answers) == total:
                self._health.mark_ready("validation")
                return
            missing = f"validation '{evaluation.label}': {total - len(evaluation.answers)} of {total} answers missing"
            self._health.wait_for("validation", missing)
            now = time.monotonic()
            if now - arrived > self._settings.trainer.batch_timeout_s:
                raise BatchTimeoutError(
                    f"{missing} after {now - arrived:.0f} s without any: is a rollout service running?"
                )
            if now - logged > LOG_INTERVAL_S:
                logged = now
                get_logger().info("validating", label=evaluation.label, have=len(evaluation.answers), want=total)
            if self._accept(evaluation, evaluation.arrivals.claim(_BLOCK_S)):
                arrived = time.monotonic()
            elif now - max(arrived, searched) > SILENCE_S:
                searched = now
                if self._find_lost(evaluation):
                    arrived = time.monotonic()

    def _find_lost(self, evaluation: _Evaluation) -> bool:
        """As the batcher does."""
        self._on_silence()

        def list_missing() -> list[int]:
            return [position for position in range(len(self._questions)) if position not in evaluation.answers]

        before = list_missing()
        lost = evaluation.arrivals.find_lost(
            evaluation.policy.version, lambda entries: self._accept(evaluation, entries), list_missing
        )
        for position, (attempt, _) in lost.items():
            self._issue(evaluation, position, attempt)
        return bool(lost) or list_missing() != before

    def _accept(self, evaluation: _Evaluation, entries: Entries) -> int:
        """Keep answers, issue failed questions again. Returns the number of entries."""
        answers = evaluation.answers
        for entry in entries:
            group = entry.message
            position = group.position
            if group.batch != evaluation.policy.version or position in answers or position >= len(self._questions):
                continue
            spans.record_claim(group)
            judged = [t for t in group.trajectories if is_judged(t)]
            if judged:
                answers[position] = judged[0]
            elif group.attempt < RETRIES:
                # The new attempt first, the failed answer second: a crash in between repeats both.
                self._issue(evaluation, position, group.attempt + 1)
                evaluation.arrivals.discard([entry.id])
            else:
                answers[position] = None
        return len(entries)

    def _end(self, evaluation: _Evaluation) -> dict[str, Any]:
        label, policy, answers = evaluation.label, evaluation.policy, evaluation.answers
        result = {
            "label": label,
            "version": policy.version,
            "epoch": policy.epoch,
            **summarize(self._questions, answers, policy.version),
            "seconds": round(time.monotonic() - evaluation.began, 3),
        }
        records = [build_record(self._questions[p], answers[p]) for p in sorted(answers)]
        write_text(self._folder / f"{label}.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        write_json(self._folder / f"{label}.json", result)
        self._open = None
        self._retry(lambda: self._streams.close_replies(evaluation.stream, policy.version))
        if result["em"] is not None:
            EM.labels(label).set(result["em"])
        for source in list_sources(self._questions):
            if (em := result[f"em/{source}"]) is not None:
                SOURCE_EM.labels(source).set(em)
        get_logger().info("validated", **result)
        return result
