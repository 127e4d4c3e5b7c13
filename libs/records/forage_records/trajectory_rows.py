"""Rows of trajectories of a validation or of a step: filtering, sorting and comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from google.protobuf.json_format import MessageToDict

from forage_proto.v1.trajectory_pb2 import ActionKind, Status, Trajectory
from forage_records.questions import Question
from forage_records.run_folder import Row
from forage_records.spans import name_author
from forage_records.statistics import mean_known
from forage_records.step_file import StepRow, read_step
from forage_records.trajectory_file import (
    count_searches,
    explain_failure,
    extract_question,
    read_exact_match,
    read_header,
)
from forage_records.view_options import SortKey
from forage_runtime.text.enums import name_value

STEP = "step"
"""Key of a row's `StepRow`, which rows of a validation lack."""


@dataclass(frozen=True)
class Filter:
    """Filter of rows. right: True keeps right answers, False wrong ones, None all."""

    right: bool | None = None
    source: str = ""
    text: str = ""
    min_reward: float | None = None

    def __call__(self, row: Row) -> bool:
        """Whether a row passes; without an exact match it is neither right nor wrong."""
        em = row.get("em")
        if self.right is not None and (em is None or (em > 0) is not self.right):
            return False
        if self.source and read_data_source(row) != self.source:
            return False
        if self.text and not (self.text in row["question"] or any(self.text in span["text"] for span in row["spans"])):
            return False
        reward = row.get("reward")
        return self.min_reward is None or (reward is not None and reward >= self.min_reward)


@dataclass(frozen=True)
class Change:
    """One question before and after: trajectories and mean rewards."""

    before: Sequence[Row]
    after: Sequence[Row]
    reward_before: float
    reward_after: float

    @property
    def gain(self) -> float:
        return self.reward_after - self.reward_before


def read_step_rows(file: Path) -> list[Row]:
    """Read the trajectories of a step's file.

    Raises:
        DataError: it is missing or damaged.
    """
    end = read_header(file).end_of_turn
    return [_make_row(found, end) for found in read_step(file)]


def build_record(question: Question, trajectory: Trajectory | None, end_of_turn: str) -> Row:
    """Build a question's line of a validation.

    Args:
        end_of_turn: text with which the policy's tokenizer ends a turn.
    """
    truth = question.ground_truth
    record: Row = {
        "uid": question.uid(0),
        "data_source": question.data_source,
        "question": question.text,
        "targets": list(truth.targets),
        "end_of_turn": end_of_turn,
    }
    if truth.HasField("countdown_target"):
        numbers = list(truth.countdown_numbers)
        record["ground_truth"] = {"target": truth.countdown_target, "numbers": numbers}
    if trajectory is None:
        return record | {"failed": True, "em": None, "answer": None, "spans": [], "turns": []}
    score, versions = trajectory.score, [segment.version for segment in trajectory.segments]
    answers = [turn.content for turn in trajectory.turns if turn.action == ActionKind.ACTION_KIND_ANSWER]
    searches = count_searches(trajectory.turns)
    return record | {
        "failed": False,
        "em": read_exact_match(trajectory),
        "reward": trajectory.score.total if score.status == Status.STATUS_OK else None,
        "reward_name": score.reward,
        "components": [{"name": c.name, "raw": c.raw, "weighted": c.weighted} for c in score.components],
        "detail": score.detail,
        "status": name_value(Status, trajectory.status),
        "reason": explain_failure(trajectory.status, trajectory.status_detail, score),
        "answer": answers[-1] if answers else None,
        "finished": trajectory.finished,
        "truncated": trajectory.truncated,
        "searches": searches,
        "searches_beyond_limit": trajectory.valid_searches - searches,
        "response_tokens": len(trajectory.loss_mask),
        "sample": trajectory.sample,
        "policy_version": max(versions, default=None),
        "policy_version_min": min(versions, default=None),
        "timings": MessageToDict(
            trajectory.timings, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ),
        "replica": trajectory.replica,
        "trace_id": trajectory.trace_id,
        "spans": [{"role": name_author(span), "text": span.text} for span in trajectory.spans],
        "turns": [MessageToDict(turn, preserving_proto_field_name=True) for turn in trajectory.turns],
    }


def read_data_source(row: Row) -> str:
    """Read the data source of a row from its uid."""
    return str(row.get("uid", "")).rsplit("/", 3)[0]


def compute_sort_value(row: Row, name: SortKey) -> float | None:
    """Compute the value to sort by; None where a row has none."""
    step: StepRow | None = row.get(STEP)
    match name:
        case SortKey.REWARD:
            return row.get("reward")
        case SortKey.LENGTH:
            return float(sum(len(span["text"]) for span in row["spans"] if span["role"] == "model"))
        case SortKey.ADVANTAGE:
            return mean_known(select_trained(step, step.advantages)) if step else None
        case SortKey.MISMATCH:
            return max(map(abs, compute_differences(step).values()), default=None) if step else None


def compute_differences(step: StepRow) -> dict[int, float]:
    """Response token → log-probability of the trainer minus that of the engine, for tokens that the policy wrote."""
    if step.log_probs is None or step.engine_log_probs is None:
        return {}
    pairs = zip(step.trajectory.loss_mask, step.log_probs, step.engine_log_probs, strict=True)
    return {place: ours - theirs for place, (own, ours, theirs) in enumerate(pairs) if own}


def select_trained(step: StepRow, values: list[float] | None) -> list[float]:
    """Select the values of tokens that were trained on."""
    return [value for value, one in zip(values or (), step.loss_mask or (), strict=bool(values)) if one]


def sort_rows(rows: Iterable[Row], by: SortKey) -> list[Row]:
    """Sort rows, the largest value first; rows without a value come last."""
    known = [(value, row) for row in rows if (value := compute_sort_value(row, by)) is not None]
    unknown = [row for row in rows if compute_sort_value(row, by) is None]
    return [row for _, row in sorted(known, key=lambda pair: pair[0], reverse=True)] + unknown


def find_changes(before: Iterable[Row], after: Iterable[Row]) -> list[Change]:
    """Compare the questions that both have, in any epoch, the largest change first; only scored rows count."""
    earlier, later = _group_by_question(before), _group_by_question(after)
    found = [
        Change(
            earlier[name],
            later[name],
            fmean(row["reward"] for row in earlier[name]),
            fmean(row["reward"] for row in later[name]),
        )
        for name in earlier
        if name in later
    ]
    return sorted(found, key=lambda change: abs(change.gain), reverse=True)


def _group_by_question(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("reward") is not None:
            found.setdefault(str(row["uid"]).rpartition("/")[0], []).append(row)
    return found


def _make_row(found: StepRow, end_of_turn: str) -> Row:
    own = found.trajectory
    answers = [turn.content for turn in own.turns if turn.action == ActionKind.ACTION_KIND_ANSWER]
    judged = own.status == Status.STATUS_OK and own.score.status == Status.STATUS_OK
    prompt = "".join(span.text for span in own.spans if name_author(span) == "prompt")
    return {
        "uid": own.group_uid,
        "question": extract_question(prompt, end_of_turn),
        "targets": list(own.ground_truth.targets),
        "failed": own.status != Status.STATUS_OK,
        "em": read_exact_match(own),
        "reward": own.score.total if judged else None,
        "answer": answers[-1] if answers else None,
        "finished": own.finished,
        "truncated": own.truncated,
        "trace_id": own.trace_id,
        "spans": [{"role": name_author(s), "text": s.text, "begin": s.begin, "end": s.end} for s in own.spans],
        STEP: found,
    }
