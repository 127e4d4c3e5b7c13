"""The advantage penalty: what a trajectory loses for being sure of its answer before it has thought.

A' = A - eta * overconfidence on the response's state tokens; overconfidence is the sum of w_k * c_k over a probe's
truncations, with w falling from 0.5 to -0.5 in equal steps. A trajectory whose confidence rises with its thought has
one below 0, and gains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from forage_common.probe import metrics
from forage_common.probe.prober import ProbePlan
from forage_common.settings import Settings
from forage_common.v1.probe_pb2 import Probed
from forage_common.v1.trajectory_pb2 import Policy, Status, Trajectory
from forage_trainer.validation.prober import Purpose, TrainingProber


def subtract_penalty(
    advantages: torch.Tensor, state: torch.Tensor, overconfidence: Sequence[float | None], coefficient: float
) -> torch.Tensor:
    """Advantages less the penalty, (rows, tokens).

    Args:
        advantages, state: (rows, tokens), state 1 on the tokens that the policy wrote.
        overconfidence: of each row, None where it was not probed: such a row keeps its advantages.
    """
    penalties = [0.0 if one is None else metrics.advantage_penalty(one, coefficient) for one in overconfidence]
    return advantages - torch.tensor(penalties, dtype=advantages.dtype)[:, None] * state


class ProbePenalty:
    """Probes the first trajectories of each group of a step."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            SettingsError: as `TrainingProber`.
        """
        penalty = settings.trainer.algorithm.probe_penalty
        self._coefficient = penalty.coef
        self._each = penalty.trajectories_per_group
        plan = ProbePlan(penalty.points, penalty.samples, settings.run.seed)
        self._prober = TrainingProber(settings, plan, Purpose.PENALTY, penalty.timeout_s, every_turn=False)

    def overconfidence(
        self, rows: Sequence[Trajectory], policy: Policy, check: Callable[[], None]
    ) -> list[float | None]:
        """Of each row; None where it is not one of the first of its group, or could not be probed.

        Args:
            policy: that is being trained.
            check: called now and then; may raise to end the work.
        """
        chosen = _first(rows, self._each)

        async def sample() -> Sequence[Trajectory]:
            return chosen

        probes = self._prober(policy, [row.id for row in chosen], sample, check)
        found = {one.trajectory_id: _overconfidence(one) for one in probes}
        return [found.get(row.id) for row in rows]

    def metrics(self, overconfidence: Sequence[float | None], rows: Sequence[Trajectory]) -> dict[str, Any]:
        """Of a step, under the names of the metrics file; means are over the rows that were probed."""
        known = [one for one in overconfidence if one is not None]
        mean = fmean(known) if known else None
        return {
            "probe_count": len(known),
            "probe_failed": len(_first(rows, self._each)) - len(known),
            "probe_overconfidence": mean,
            "probe_penalty": None if mean is None else metrics.advantage_penalty(mean, self._coefficient),
        }


def _first(rows: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """So many of each group."""
    seen: Counter[str] = Counter()
    chosen = []
    for row in rows:
        if seen[row.group_uid] < count:
            chosen.append(row)
        seen[row.group_uid] += 1
    return chosen


def _overconfidence(probed: Probed) -> float | None:
    return metrics.measure(probed).overconfidence if probed.status == Status.STATUS_OK else None
