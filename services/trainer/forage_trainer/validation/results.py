"""Results of a validation: which trajectories count, the summary, and the records for reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forage_proto.v1.trajectory_pb2 import Status
from forage_proto.v1.trajectory_pb2 import Trajectory as TrajectoryMessage
from forage_records.questions import Question
from forage_records.trajectory_file import count_searches
from forage_trainer.reporting.metrics import exact_match, format_rate
from forage_trajectory.trajectory import Trajectory


def is_judged(trajectory: Trajectory) -> bool:
    """Whether a trajectory is a result of the policy, and not a failure of a service."""
    return trajectory.status == Status.STATUS_OK and trajectory.validation_score.status == Status.STATUS_OK


def is_rewarded(trajectory: Trajectory) -> bool:
    """Whether a trajectory has what it would be trained on with, an exact match or not."""
    return trajectory.status == Status.STATUS_OK and trajectory.score.status == Status.STATUS_OK


def later_version_share(trajectories: Iterable[TrajectoryMessage], version: int) -> float | None:
    """Share of state tokens sampled by a policy after `version`; None without any token."""
    later = tokens = 0
    for trajectory in trajectories:
        for segment in trajectory.segments:
            sampled = sum(trajectory.loss_mask[segment.begin : segment.end])
            tokens += sampled
            later += sampled if segment.version > version else 0
    return later / tokens if tokens else None


def list_sources(questions: Sequence[Question]) -> list[str]:
    """List the data sources of the questions, sorted."""
    return sorted({question.data_source for question in questions})


def summarize(
    questions: Sequence[Question], answers: Mapping[int, TrajectoryMessage | None], version: int
) -> dict[str, Any]:
    """Compute the metrics of a validation.

    Args:
        answers: by the position of the question; None where it failed for good.
        version: of the policy that was validated.
    """
    judged = [t for t in answers.values() if t is not None]
    count = len(judged)
    by_source = {
        f"em/{source}": exact_match(
            t.validation_score for p, t in answers.items() if t and questions[p].data_source == source
        )
        for source in list_sources(questions)
    }
    return {
        "em": exact_match(t.validation_score for t in judged),
        **by_source,
        "count": len(answers),
        "failed": len(answers) - count,
        "search_rate": sum(count_searches(t.turns) > 0 for t in judged) / count if count else None,
        "format_rate": format_rate(t.score for t in judged),
        "turns_mean": sum(len(t.turns) for t in judged) / count if count else None,
        "response_tokens_mean": sum(len(t.loss_mask) for t in judged) / count if count else None,
        "later_version_share": later_version_share(judged, version),
    }
