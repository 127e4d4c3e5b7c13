"""Metrics of one question: a row, computed from the trajectories of one policy with one method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from forage_cli.evaluation.methods import Method, is_countdown
from forage_proto.v1.trajectory_pb2 import ActionKind, Role, Status, Trajectory
from forage_records.questions import Question
from forage_records.statistics import mean_known
from forage_records.trajectory_file import count_searches
from forage_runtime.text.answers import f1, is_retrieval_correct, normalize_answer, subem_check
from forage_runtime.text.enums import name_value
from forage_runtime.text.tags import Tag, find_blocks

FORMAT = "format"
"""Component of a reward that says whether a trajectory kept the format."""


@dataclass(frozen=True)
class QuestionResult:
    """Result of a question for a policy and a method. Values are means over the scored samples; None without any.

    Attributes:
        uid: identifies the question by data source, split and index.
        judged, failed: number of samples with and without a score; a failed sample is not a wrong answer.
        failure: error of the first failed sample.
        em: exact match as the reward service computes it; of a countdown problem, whether the equation holds.
        sub_em, f1: None where the ground truth is no text.
        hit: an accepted answer is in the retrieved passages; None where nothing is retrieved.
        truncated: tokens were cut at a limit. finished: an answer was given.
        format: the reward's own check of the format; None where it has none.
        prompt_tokens: length of the first prompt. generated_tokens: written by the policy.
        seconds: from the first generation's request to the score, under the load of the evaluation.
        answers, rights: one entry per scored sample.
        versions: policy versions that wrote the samples.
    """

    policy: str
    method: str
    data_source: str
    uid: str
    question: str
    targets: list[str]
    judged: int
    failed: int
    failure: str
    em: float | None
    sub_em: float | None
    f1: float | None
    searches: float | None
    turns: float | None
    hit: float | None
    truncated: float | None
    finished: float | None
    format: float | None
    prompt_tokens: float | None
    generated_tokens: float | None
    seconds: float | None
    answers: list[str | None]
    rights: list[bool]
    versions: list[int]

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> QuestionResult:
        """Read a row of results.parquet; unknown columns are ignored."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})


def is_judged(trajectory: Trajectory) -> bool:
    """Whether the trajectory has a score; one that failed says nothing about the policy."""
    return trajectory.status == Status.STATUS_OK and trajectory.validation_score.status == Status.STATUS_OK


def measure_question(
    policy: str, method: Method, question: Question, trajectories: Sequence[Trajectory]
) -> QuestionResult:
    """Compute the row of one question."""
    judged = [trajectory for trajectory in trajectories if is_judged(trajectory)]
    failed = [trajectory for trajectory in trajectories if not is_judged(trajectory)]
    truth, targets = question.ground_truth, list(question.ground_truth.targets)
    given = [find_answer(trajectory) for trajectory in judged]
    texts = targets and not is_countdown(question)
    return QuestionResult(
        policy=policy,
        method=method,
        data_source=question.data_source,
        uid=make_question_uid(question),
        question=question.text,
        targets=targets or [f"{truth.countdown_target} from {', '.join(map(str, truth.countdown_numbers))}"],
        judged=len(judged),
        failed=len(failed),
        failure=_describe_failure(failed[0]) if failed else "",
        em=mean_known(trajectory.validation_score.total for trajectory in judged),
        sub_em=mean_known(float(subem_check(text, targets)) if text is not None else 0.0 for text in given)
        if texts
        else None,
        f1=mean_known(f1(text, targets) if text is not None else 0.0 for text in given) if texts else None,
        searches=mean_known(count_searches(trajectory.turns) for trajectory in judged),
        turns=mean_known(len(trajectory.turns) for trajectory in judged),
        hit=mean_known(float(is_retrieval_correct(find_shown_passages(method, t), targets)) for t in judged)
        if texts and method in (Method.SEARCH, Method.RAG)
        else None,
        truncated=mean_known(trajectory.truncated for trajectory in judged),
        finished=mean_known(trajectory.finished for trajectory in judged),
        format=mean_known(c.raw > 0 for t in judged for c in t.score.components if c.name == FORMAT),
        prompt_tokens=mean_known(trajectory.prompt_length for trajectory in judged),
        generated_tokens=mean_known(sum(trajectory.loss_mask) for trajectory in judged),
        seconds=mean_known(trajectory.timings.total_s + trajectory.timings.score_s for trajectory in judged),
        answers=[normalize_vote(text, is_countdown(question)) for text in given],
        rights=[trajectory.validation_score.total >= 1 for trajectory in judged],
        versions=sorted({segment.version for trajectory in judged for segment in trajectory.segments}),
    )


def make_question_uid(question: Question) -> str:
    """Return the question's uid, which does not depend on the method."""
    return question.uid("").removesuffix("/")


def find_answer(trajectory: Trajectory) -> str | None:
    """Return the last answer; None without one."""
    given = [turn.content for turn in trajectory.turns if turn.action == ActionKind.ACTION_KIND_ANSWER]
    return given[-1] if given else None


def normalize_vote(text: str | None, is_equation: bool) -> str | None:
    """Normalize an answer for the majority vote."""
    if text is None:
        return None
    return "".join(text.split()) if is_equation else normalize_answer(text)


def find_shown_passages(method: Method, trajectory: Trajectory) -> list[str]:
    """Return the passages that the policy was shown: in observations, or in the prompt of one-shot RAG."""
    author = Role.ROLE_PROMPT if method is Method.RAG else Role.ROLE_ENV
    texts = [span.text for span in trajectory.spans if span.role == author]
    return [block for text in texts for block in find_blocks(text, Tag.INFORMATION)]


def _describe_failure(trajectory: Trajectory) -> str:
    unjudged = trajectory.status == Status.STATUS_OK
    status = trajectory.validation_score.status if unjudged else trajectory.status
    detail = trajectory.validation_score.detail if unjudged else trajectory.status_detail
    return f"{name_value(Status, status)}: {detail}"
