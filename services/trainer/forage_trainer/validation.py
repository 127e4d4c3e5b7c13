"""Greedy evaluation of held-out questions through the same streams and the same loop as training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from prometheus_client import Gauge

from forage_common.questions import Question
from forage_common.settings import Settings
from forage_common.streams import Entry, StreamClient
from forage_common.telemetry import Health, get_logger
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
from forage_trainer.batcher import CONSUMER, BatchTimeoutError
from forage_trainer.feeder import ISSUED
from forage_trainer.files import write_json, write_text
from forage_trainer.metrics import exact_match, format_rate
from forage_trainer.progress import Phase, StateFile
from forage_trainer.waiting import Insist, Stop

RETRIES = 2
"""Times that a failed question is asked again before it counts as failed."""
_TAKE = 256
_BLOCK_S = 1.0
_SAY_EVERY_S = 10.0
EM = Gauge("forage_trainer_validation_em", "Exact match of a validation", ["label"])
SOURCE_EM = Gauge("forage_trainer_validation_source_em", "Exact match of the last validation", ["data_source"])


def judged(trajectory: Trajectory) -> bool:
    """Whether a trajectory says anything about the policy."""
    return trajectory.status == Status.STATUS_OK and trajectory.validation_score.status == Status.STATUS_OK


class Validation:
    """Evaluations of one run, each done once and written to `<run folder>/validation/`."""

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        questions: Sequence[Question],
        state: StateFile,
        insist: Insist,
        stop: Stop,
        health: Health,
    ) -> None:
        self._settings = settings
        self._streams = streams
        self._questions = questions
        self._state = state
        self._insist = insist
        self._stop = stop
        self._health = health
        self._folder = settings.run.folder / "validation"

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
        stream = self._streams.key(f"validation-{label}")
        if self.done(label, policy.version):
            self._insist(lambda: self._streams.drop(stream))
            return None
        began = time.monotonic()
        self._insist(lambda: self._streams.create(stream))
        for position in range(len(self._questions)):
            self._issue(stream, policy, position, 0)
        meanwhile()
        answers = self._collect(stream, policy, label)
        result = self._summary(label, policy, answers, time.monotonic() - began)
        records = [self._record(self._questions[p], answers[p]) for p in sorted(answers)]
        write_text(self._folder / f"{label}.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        write_json(self._folder / f"{label}.json", result)
        self._insist(lambda: self._streams.drop(stream))
        if result["em"] is not None:
            EM.labels(label).set(result["em"])
        for source in self._sources():
            if (em := result[f"em/{source}"]) is not None:
                SOURCE_EM.labels(source).set(em)
        get_logger().info("validated", **result)
        return result

    def _issue(self, stream: str, policy: Policy, position: int, attempt: int) -> None:
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
            trace_id=f"{run_id}/validation/{policy.version}/{uid}/{attempt}",
            issued_unix_ms=int(time.time() * 1000),
            reply_stream=stream,
        )
        if self._insist(lambda: self._streams.issue(prompt)):
            ISSUED.labels("validation").inc()

    def _collect(self, stream: str, policy: Policy, label: str) -> dict[int, Trajectory | None]:
        """Position → trajectory; None where a question failed for good."""
        answers: dict[int, Trajectory | None] = {}
        total = len(self._questions)
        entries = self._insist(lambda: self._streams.reclaim_groups(stream, CONSUMER, 100_000))
        arrived = said = time.monotonic()
        while True:
            for entry in entries:
                arrived = time.monotonic()
                self._accept(entry, stream, policy, answers)
            self._state.set(Phase.VALIDATING, label, len(answers), total)
            if len(answers) == total:
                self._health.have("validation")
                return answers
            missing = f"validation '{label}': {total - len(answers)} of {total} answers missing"
            self._health.wait_for("validation", missing)
            now = time.monotonic()
            if now - arrived > self._settings.trainer.batch_timeout_s:
                raise BatchTimeoutError(
                    f"{missing} after {now - arrived:.0f} s without any: is a rollout service running?"
                )
            if now - said > _SAY_EVERY_S:
                said = now
                get_logger().info("validating", label=label, have=len(answers), want=total)
            entries = self._insist(lambda: self._streams.take_groups(stream, CONSUMER, _TAKE, _BLOCK_S))
            if not entries and now - arrived > _SAY_EVERY_S:
                entries = self._insist(lambda: self._streams.reclaim_groups(stream, CONSUMER, 100_000))
                entries = [entry for entry in entries if entry.message.position not in answers]

    def _accept(
        self, entry: Entry[TrajectoryGroup], stream: str, policy: Policy, answers: dict[int, Trajectory | None]
    ) -> None:
        group = entry.message
        place = group.position
        if group.batch != policy.version or place in answers or place >= len(self._questions):
            return
        good = [t for t in group.trajectories if judged(t)]
        if good:
            answers[place] = good[0]
        elif group.attempt < RETRIES:
            self._issue(stream, policy, place, group.attempt + 1)
            self._insist(lambda: self._streams.discard(stream, [entry.id]))
        else:
            answers[place] = None

    def _summary(
        self, label: str, policy: Policy, answers: dict[int, Trajectory | None], seconds: float
    ) -> dict[str, Any]:
        sound = [t for t in answers.values() if t is not None]
        count = len(sound)
        by_source = {
            f"em/{source}": exact_match(t for p, t in answers.items() if t and self._questions[p].data_source == source)
            for source in self._sources()
        }
        return {
            "label": label,
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
            "seconds": round(seconds, 3),
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
            "spans": [{"role": _role(span.role), "text": span.text} for span in trajectory.spans],
            "turns": [MessageToDict(turn, preserving_proto_field_name=True) for turn in trajectory.turns],
        }


def _role(role: Role.ValueType) -> str:
    return Role.Name(role).removeprefix("ROLE_").lower()
