"""Greedy evaluation of held-out questions, through the same streams and rollout service as training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Gauge

from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Purpose, Sampling
from forage_proto.v1.trajectory_pb2 import Trajectory as TrajectoryMessage
from forage_queue.streams.client import VALIDATION, StreamClient
from forage_queue.trainer import spans
from forage_queue.trainer.batcher import LOG_INTERVAL_S, Arrivals, BatchTimeoutError, Entries, Receiver
from forage_queue.trainer.feeder import ISSUED, SOURCES
from forage_records.questions import Question
from forage_records.run_folder import WATCH
from forage_records.trajectory_rows import build_record
from forage_runtime.files.folders import write_json, write_text
from forage_runtime.files.model_folder import read_end_of_turn
from forage_runtime.files.template_values import build_template_values
from forage_runtime.retries import Retries
from forage_runtime.settings import Settings
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.label_names import OTHER
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import Wait, waiting
from forage_trainer.data.texts import TextReader
from forage_trainer.reporting.progress import Phase, StateFile
from forage_trainer.validation.answers import StoredAnswers
from forage_trainer.validation.results import is_judged, is_rewarded, list_sources, summarize
from forage_trajectory.codec import restore_trajectory
from forage_trajectory.trajectory import Group, Trajectory

RETRIES = 2
"""Times that a failed question is issued again before it counts as failed."""
_BLOCK_S = 1.0
_POLL_BLOCK_S = 0.001
EM = Gauge("forage_trainer_validation_em", "Exact match of a validation", ["label"])
SOURCE_EM = Gauge("forage_trainer_validation_source_em", "Exact match of the last validation", ["data_source"])


@dataclass
class _Evaluation:
    """An evaluation in progress.

    answers: by position; None where a question failed for good. outstanding: positions that were issued and have no
    answer. next: the first position that was not issued.
    """

    label: str
    policy: Policy
    stream: str
    arrivals: Arrivals
    stored: StoredAnswers
    began: float
    answers: dict[int, TrajectoryMessage | None] = field(default_factory=dict)
    outstanding: set[int] = field(default_factory=set)
    next: int = 0


def name_watch(version: int) -> str:
    """The label of an evaluation of the watched questions."""
    return f"{WATCH}{version}"


def is_watch(label: str) -> bool:
    """Whether a label is of watched questions."""
    return label.startswith(WATCH)


class Validation:
    """The evaluations of one set of questions in one run, each done once and written to `<run folder>/validation/`.

    After `begin`, `poll` collects answers while training continues, and `finish` waits for the rest.

    Redis holds as many answers as a batch of training has trajectories, at most: no more questions are outstanding, and
    an answer leaves its stream once it is stored in a file.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        questions: Sequence[Question],
        state: StateFile,
        retries: Retries,
        health: Health,
        on_silence: Callable[[], object] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            on_silence: called when nothing has arrived for a while.
            check: raises where the answers must not count.
        """
        self._settings = settings
        self._template = build_template_values(settings)
        self._streams = streams
        self._questions = questions
        self._state = state
        self._retries = retries
        self._health = health
        self._on_silence = on_silence
        self._check = check
        self._most_outstanding = settings.data.train_batch_size * settings.rollout.n
        self._folder = settings.run.folder / "validation"
        self._texts = TextReader(settings.model.path)
        self._open: _Evaluation | None = None
        self._restored: dict[str, Any] = {}

    def is_done(self, label: str, version: int) -> bool:
        """Whether the result of this evaluation of this version is on disk."""
        try:
            return bool(json.loads((self._folder / f"{label}.json").read_text(encoding="utf-8"))["version"] == version)
        except (OSError, ValueError, KeyError):
            return False

    def scores(self) -> dict[int, float]:
        """Policy version → mean exact match, of all evaluations of held-out questions whose result is on disk."""
        scores: dict[int, float] = {}
        for file in sorted(self._folder.glob("*.json")):
            if is_watch(file.stem):
                continue
            try:
                result = json.loads(file.read_text(encoding="utf-8"))
                scores[int(result["version"])] = float(result["em"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                get_logger().warning("validation_without_score", file=str(file), reason=repr(error))
        return scores

    def begin(self, label: str, policy: Policy) -> None:
        """Begin to issue every question, to be answered greedily under `policy` or later; nothing if this was done.

        One may be open at a time.
        """
        stream = self._streams.key(f"{VALIDATION}{label}")
        stored = StoredAnswers(self._folder, label, self._streams.epoch)
        if self.is_done(label, policy.version):
            self._close(stream, policy, stored)
            return
        self._retries.redis(lambda: self._streams.open_replies(stream, policy.version))
        arrivals = Arrivals(self._streams, stream, self._retries.redis, on_silence=self._on_silence)
        self._open = _Evaluation(label, policy, stream, arrivals, stored, time.monotonic())
        self._take(self._open, [group for group in stored.read() if group.batch == policy.version])
        self._issue_more(self._open)
        # Redis ignores questions that an earlier process issued; their answers may have been claimed by it.
        self._accept(self._open, arrivals.reclaim())

    def poll(self) -> dict[str, Any] | None:
        """Claim the answers that have arrived; returns the result once complete, None before or if none is open."""
        if self._open is None:
            return None
        taken = 0  # training goes on, however fast answers arrive
        while taken < self._most_outstanding and (entries := self._open.arrivals.claim(_POLL_BLOCK_S)):
            taken += len(entries)
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
        """The open evaluation, for a checkpoint. Its questions are in Redis, its answers there and in a file."""
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

    def _issue_more(self, evaluation: _Evaluation) -> None:
        """Issue further questions, as many as may be outstanding."""
        while len(evaluation.outstanding) < self._most_outstanding and evaluation.next < len(self._questions):
            position = evaluation.next
            evaluation.next += 1
            if position not in evaluation.answers:
                evaluation.outstanding.add(position)
                self._issue(evaluation, position, 0)

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
            template=self._template,
        )
        with spans.trace_issue(prompt):
            issued = self._retries.redis(lambda: self._streams.issue(prompt))
        if issued:
            ISSUED.labels("validation").inc()

    def _collect(self, evaluation: _Evaluation) -> None:
        with waiting("answers of a validation", on="rollout", limit_s=self._settings.trainer.batch_timeout_s) as wait:
            self._collect_all(evaluation, wait)

    def _collect_all(self, evaluation: _Evaluation, wait: Wait) -> None:
        total, arrivals = len(self._questions), evaluation.arrivals
        receiver = Receiver(
            lambda entries: self._accept(evaluation, entries),
            lambda: [(evaluation.policy.version, position) for position in sorted(evaluation.outstanding)],
            lambda place, attempt, _: self._issue(evaluation, place[1], attempt),
        )
        logged = time.monotonic()
        arrivals.begin_wait()
        while True:
            self._state.set(Phase.VALIDATING, evaluation.label, len(evaluation.answers), total)
            if len(evaluation.answers) == total:
                self._health.mark_ready("validation")
                return
            missing = f"validation '{evaluation.label}': {total - len(evaluation.answers)} of {total} answers missing"
            wait.detail = missing
            wait.renew(arrivals.silence_s)
            self._health.wait_for("validation", missing)
            if arrivals.silence_s > self._settings.trainer.batch_timeout_s:
                raise BatchTimeoutError(
                    f"{missing} after {arrivals.silence_s:.0f} s without any: is a rollout service running?"
                )
            if time.monotonic() - logged > LOG_INTERVAL_S:
                logged = time.monotonic()
                get_logger().info("validating", label=evaluation.label, have=len(evaluation.answers), want=total)
            arrivals.receive(receiver, _BLOCK_S)

    def _accept(self, evaluation: _Evaluation, entries: Entries) -> int:
        """Store answers and issue failed questions again; both leave the stream. Returns the number of entries."""
        final = []
        for entry in entries:
            group = entry.message
            if group.batch != evaluation.policy.version or group.position in evaluation.answers:
                continue  # of an earlier validation of this label, or a second answer
            spans.record_claim(group)
            if self._find_answer(evaluation, group) is not None or group.attempt >= RETRIES:
                final.append(group)
            else:
                self._issue(evaluation, group.position, group.attempt + 1)
        # A crash before the discard repeats all this.
        self._retries.disk(lambda: evaluation.stored.append(final))
        self._take(evaluation, final)
        evaluation.arrivals.discard(entry.id for entry in entries)
        self._issue_more(evaluation)
        return len(entries)

    def _take(self, evaluation: _Evaluation, groups: Iterable[Group]) -> None:
        for group in groups:
            if group.position < len(self._questions):
                answer = self._find_answer(evaluation, group)
                evaluation.answers.setdefault(group.position, None if answer is None else self._read(answer))
                evaluation.outstanding.discard(group.position)

    def _read(self, trajectory: Trajectory) -> TrajectoryMessage:
        """The whole message, with its texts."""
        message = restore_trajectory(trajectory)
        self._texts.restore([message])
        return message

    def _find_answer(self, evaluation: _Evaluation, group: Group) -> Trajectory | None:
        """The answer that counts; a watched question needs no exact match, which rewards of one's own may lack."""
        counts = is_rewarded if is_watch(evaluation.label) else is_judged
        return next((trajectory for trajectory in group.trajectories if counts(trajectory)), None)

    def _close(self, stream: str, policy: Policy, stored: StoredAnswers) -> None:
        """Delete what Redis and files hold of an evaluation whose result is written."""
        self._retries.redis(lambda: self._streams.close_replies(stream, policy.version))
        stored.delete()

    def _end(self, evaluation: _Evaluation) -> dict[str, Any]:
        self._check()
        self._retries.redis(self._streams.check_epoch)  # the files are those of the latest trainer
        label, policy, answers = evaluation.label, evaluation.policy, evaluation.answers
        result = {
            "label": label,
            "version": policy.version,
            "epoch": policy.epoch,
            **summarize(self._questions, answers, policy.version),
            "seconds": round(time.monotonic() - evaluation.began, 3),
        }
        end = read_end_of_turn(self._settings.model.path)
        records = [build_record(self._questions[p], answers[p], end) for p in sorted(answers)]
        lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
        self._retries.disk(lambda: write_text(self._folder / f"{label}.jsonl", lines))
        self._retries.disk(lambda: write_json(self._folder / f"{label}.json", result))
        self._open = None
        self._close(evaluation.stream, policy, evaluation.stored)
        if not is_watch(label):
            self._export(result)
        get_logger().info("validated", **result)
        return result

    def _export(self, result: dict[str, Any]) -> None:
        """Set the Prometheus metrics."""
        if result["em"] is not None:
            EM.labels(result["label"]).set(result["em"])
        for source in list_sources(self._questions):
            em, name = result[f"em/{source}"], SOURCES.name(source)
            if em is not None and name != OTHER:  # of many sources together it would be that of the last one
                SOURCE_EM.labels(name).set(em)
