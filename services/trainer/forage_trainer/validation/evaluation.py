"""Greedy evaluation of held-out questions through the same streams and the same loop as training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from google.protobuf.json_format import MessageToDict
from prometheus_client import Gauge

from forage_common.files.questions import Question
from forage_common.settings import Settings
from forage_common.streams.client import Entry, StreamClient
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import (
    ActionKind,
    Policy,
    Prompt,
    Purpose,
    Role,
    Sampling,
    Status,
    Trajectory,
    TrajectoryGroup,
)
from forage_trainer.data import spans
from forage_trainer.data.batcher import CONSUMER, BatchTimeoutError
from forage_trainer.data.feeder import ISSUED
from forage_trainer.files import write_json, write_text
from forage_trainer.reporting.metrics import exact_match, format_rate
from forage_trainer.reporting.progress import Phase, StateFile
from forage_trainer.waiting import RedisRetry, Stop

RETRIES = 2
"""Times that a failed question is asked again before it counts as failed."""
_TAKE = 256
_BLOCK_S = 1.0
_MOMENT_S = 0.001
LOG_INTERVAL_S = 10.0
EM = Gauge("forage_trainer_validation_em", "Exact match of a validation", ["label"])
SOURCE_EM = Gauge("forage_trainer_validation_source_em", "Exact match of the last validation", ["data_source"])


def judged(trajectory: Trajectory) -> bool:
    """Whether a trajectory says anything about the policy."""
    return trajectory.status == Status.STATUS_OK and trajectory.validation_score.status == Status.STATUS_OK


def compute_later_version_share(trajectories: Iterable[Trajectory], version: int) -> float | None:
    """Share of the policy's own tokens that a policy after `version` sampled; None if there are no tokens."""
    later = tokens = 0
    for trajectory in trajectories:
        for segment in trajectory.segments:
            own = sum(trajectory.loss_mask[segment.begin : segment.end])
            tokens += own
            later += own if segment.version > version else 0
    return later / tokens if tokens else None


@dataclass
class _Open:
    """An evaluation under way. answers: by position; None where a question failed for good."""

    label: str
    policy: Policy
    stream: str
    began: float
    answers: dict[int, Trajectory | None] = field(default_factory=dict)


class Validation:
    """Evaluations of one run, each done once and written to `<run folder>/validation/`.

    One at a time: `run` waits for its answers; after `begin` they are collected by `poll`, while training goes on.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        questions: Sequence[Question],
        state: StateFile,
        retry: RedisRetry,
        stop: Stop,
        health: Health,
    ) -> None:
        self._settings = settings
        self._streams = streams
        self._questions = questions
        self._state = state
        self._retry = retry
        self._stop = stop
        self._health = health
        self._folder = settings.run.folder / "validation"
        self._open: _Open | None = None
        self._left: dict[str, Any] = {}

    def done(self, label: str, version: int) -> bool:
        """Whether this evaluation of this version has its result on disk."""
        try:
            return bool(json.loads((self._folder / f"{label}.json").read_text())["version"] == version)
        except (OSError, ValueError, KeyError):
            return False

    def scores(self) -> dict[int, float]:
        """Policy version → mean exact match, of all evaluations whose result is on disk."""
        found: dict[int, float] = {}
        for file in sorted(self._folder.glob("*.json")):
            try:
                result = json.loads(file.read_text())
                found[int(result["version"])] = float(result["em"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                get_logger().warning("validation_without_score", file=str(file), reason=repr(error))
        return found

    def run(self, label: str, policy: Policy, meanwhile: Callable[[], object] = lambda: None) -> dict[str, Any] | None:
        """Ask every question once, greedily, under `policy` or later; write and return the result.

        Args:
            meanwhile: called once all questions are on the stream.

        Returns: None if it was done before.

        Raises:
            BatchTimeoutError: nothing arrived for trainer.batch_timeout_s.
        """
        self.begin(label, policy)
        meanwhile()
        return self.finish()

    def begin(self, label: str, policy: Policy) -> None:
        """Put every question on the stream, unless this evaluation has its result; one may be open at a time."""
        stream = self._streams.key(f"validation-{label}")
        if self.done(label, policy.version):
            self._retry(lambda: self._streams.delete(stream))
            return
        self._retry(lambda: self._streams.create_groups(stream))
        self._open = _Open(label, policy, stream, time.monotonic())
        for position in range(len(self._questions)):
            self._issue(self._open, position, 0)
        self._reclaim(self._open)

    def poll(self) -> dict[str, Any] | None:
        """Take the answers that are there; the result once it is written, None before and where none is open."""
        if self._open is None:
            return None
        while self._take(self._open, _MOMENT_S):
            pass
        return self._end(self._open) if len(self._open.answers) == len(self._questions) else None

    def finish(self) -> dict[str, Any] | None:
        """Wait for the answers that are missing; the result once it is written, None where none is open.

        Raises:
            BatchTimeoutError: nothing arrived for trainer.batch_timeout_s.
        """
        if self._open is None:
            return None
        self._collect(self._open)
        return self._end(self._open)

    @property
    def open_versions(self) -> set[int]:
        """Policies whose evaluation is under way."""
        return set() if self._open is None else {self._open.policy.version}

    def state_dict(self) -> dict[str, Any]:
        """Of a checkpoint: the evaluation that is open. Its questions and answers are in Redis."""
        left = self._open
        return {} if left is None else {"label": left.label, "version": left.policy.version, "epoch": left.policy.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = state

    def resume(self) -> None:
        """Open what was open in the checkpoint that was read."""
        if left := self._left:
            self.begin(left["label"], Policy(version=left["version"], epoch=left["epoch"]))

    def _issue(self, asked: _Open, position: int, attempt: int) -> None:
        policy = asked.policy
        question = self._questions[position]
        run_id = self._settings.run.id
        uid = question.uid(0)
        prompt = Prompt(
            run_id=run_id,
            group_uid=uid,
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
            reply_stream=asked.stream,
        )
        with spans.issuing(prompt):
            issued = self._retry(lambda: self._streams.issue(prompt))
        if issued:
            ISSUED.labels("validation").inc()

    def _collect(self, asked: _Open) -> None:
        total = len(self._questions)
        arrived = said = time.monotonic()
        while True:
            self._state.set(Phase.VALIDATING, asked.label, len(asked.answers), total)
            if len(asked.answers) == total:
                self._health.mark_ready("validation")
                return
            missing = f"validation '{asked.label}': {total - len(asked.answers)} of {total} answers missing"
            self._health.wait_for("validation", missing)
            now = time.monotonic()
            if now - arrived > self._settings.trainer.batch_timeout_s:
                raise BatchTimeoutError(
                    f"{missing} after {now - arrived:.0f} s without any: is a rollout service running?"
                )
            if now - said > LOG_INTERVAL_S:
                said = now
                get_logger().info("validating", label=asked.label, have=len(asked.answers), want=total)
            if self._take(asked, _BLOCK_S) or (now - arrived > LOG_INTERVAL_S and self._reclaim(asked)):
                arrived = time.monotonic()

    def _take(self, asked: _Open, block_s: float) -> int:
        entries = self._retry(lambda: self._streams.claim_groups(asked.stream, CONSUMER, _TAKE, block_s))
        return self._accept(asked, entries)

    def _reclaim(self, asked: _Open) -> int:
        entries = self._retry(lambda: self._streams.reclaim_groups(asked.stream, CONSUMER, 100_000))
        return self._accept(asked, [entry for entry in entries if entry.message.position not in asked.answers])

    def _accept(self, asked: _Open, entries: Sequence[Entry[TrajectoryGroup]]) -> int:
        """Keep answers, ask failed questions again. Returns how many entries there were."""
        for entry in entries:
            group = entry.message
            place = group.position
            if group.batch != asked.policy.version or place in asked.answers or place >= len(self._questions):
                continue
            spans.taken(group)
            good = [t for t in group.trajectories if judged(t)]
            if good:
                asked.answers[place] = good[0]
            elif group.attempt < RETRIES:
                self._issue(asked, place, group.attempt + 1)
                self._retry(partial(self._streams.discard, asked.stream, [entry.id]))
            else:
                asked.answers[place] = None
        return len(entries)

    def _end(self, asked: _Open) -> dict[str, Any]:
        label, answers = asked.label, asked.answers
        result = self._summary(asked)
        records = [self._record(self._questions[p], answers[p]) for p in sorted(answers)]
        write_text(self._folder / f"{label}.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        write_json(self._folder / f"{label}.json", result)
        self._open = None
        self._retry(lambda: self._streams.delete(asked.stream))
        if result["em"] is not None:
            EM.labels(label).set(result["em"])
        for source in self._sources():
            if (em := result[f"em/{source}"]) is not None:
                SOURCE_EM.labels(source).set(em)
        get_logger().info("validated", **result)
        return result

    def _summary(self, asked: _Open) -> dict[str, Any]:
        policy, answers = asked.policy, asked.answers
        sound = [t for t in answers.values() if t is not None]
        count = len(sound)
        by_source = {
            f"em/{source}": exact_match(t for p, t in answers.items() if t and self._questions[p].data_source == source)
            for source in self._sources()
        }
        return {
            "label": asked.label,
            "version": policy.version,
            "epoch": policy.epoch,
            "em": exact_match(sound),
            **by_source,
            "count": len(answers),
            "failed": len(answers) - count,
            "search_rate": sum(t.valid_searches > 0 for t in sound) / count if count else None,
            "format_rate": format_rate(sound),
            "turns_mean": sum(len(t.turns) for t in sound) / count if count else None,
            "response_tokens_mean": sum(len(t.loss_mask) for t in sound) / count if count else None,
            "later_version_share": compute_later_version_share(sound, policy.version),
            "seconds": round(time.monotonic() - asked.began, 3),
        }

    def _sources(self) -> list[str]:
        return sorted({question.data_source for question in self._questions})

    def _record(self, question: Question, trajectory: Trajectory | None) -> dict[str, Any]:
        """One line of the report's data."""
        known = {"uid": question.uid(0), "question": question.text, "targets": list(question.ground_truth.targets)}
        if trajectory is None:
            return known | {"failed": True, "em": None, "answer": None, "spans": [], "turns": []}
        answer = [turn.content for turn in trajectory.turns if turn.action == ActionKind.ACTION_KIND_ANSWER]
        return known | {
            "failed": False,
            "em": trajectory.validation_score.total,
            "reward": trajectory.score.total,
            "answer": answer[-1] if answer else None,
            "finished": trajectory.finished,
            "truncated": trajectory.truncated,
            "trace_id": trajectory.trace_id,
            "spans": [{"role": _role(span.role), "text": span.text} for span in trajectory.spans],
            "turns": [MessageToDict(turn, preserving_proto_field_name=True) for turn in trajectory.turns],
        }


def _role(role: Role.ValueType) -> str:
    return Role.Name(role).removeprefix("ROLE_").lower()
