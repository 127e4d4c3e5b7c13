"""The advantage penalty for overconfidence: confidence in the answer before the reasoning.

A' = A - eta * overconfidence on the response's state tokens. Overconfidence is the sum of w_k * c_k over a probe's
truncations, with c_k the confidence and w_k decreasing from 0.5 to -0.5 in equal steps. It is below 0 where the
confidence rises with the reasoning; such a trajectory gains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from forage_probe import metrics as probe_metrics
from forage_proto.v1.trajectory_pb2 import Policy, Status
from forage_proto.v1.trajectory_pb2 import Trajectory as TrajectoryMessage
from forage_runtime.settings import Settings
from forage_trainer.data.texts import TextReader
from forage_trainer.validation.prober import Purpose, TrainingProber
from forage_trajectory.codec import restore_trajectory
from forage_trajectory.trajectory import Trajectory


def subtract_penalty(
    advantages: torch.Tensor, state: torch.Tensor, overconfidence: Sequence[float | None], coefficient: float
) -> torch.Tensor:
    """Subtract the penalty from the advantages of state tokens, (rows, tokens).

    Args:
        advantages, state: (rows, tokens), state 1 on the tokens that the policy sampled.
        overconfidence: of each row; None for a row that was not probed, whose advantages stay.
    """
    penalties = [
        0.0 if value is None else probe_metrics.advantage_penalty(value, coefficient) for value in overconfidence
    ]
    return advantages - torch.tensor(penalties, dtype=advantages.dtype)[:, None] * state


class ProbePenalty:
    """Probes the first trajectory of each group of a step."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            SettingsError: as `TrainingProber`.
        """
        self._coefficient = settings.trainer.algorithm.probe_penalty.coef
        self._texts = TextReader(settings.model.path)
        self._prober = TrainingProber(settings, Purpose.PENALTY)

    def measure_overconfidence(
        self, rows: Sequence[Trajectory], policy: Policy, check: Callable[[], None]
    ) -> list[float | None]:
        """Measure each row's overconfidence; None for rows that are not the first of their group or that failed.

        Args:
            policy: the policy that is being trained.
            check: called periodically; may raise to end the work.
        """
        chosen = [restore_trajectory(row) for row in _select_first(rows)]
        self._texts.restore(chosen)

        async def sample() -> Sequence[TrajectoryMessage]:
            return chosen

        probes = self._prober(policy, [row.id for row in chosen], sample, check)
        by_id = {
            probe.trajectory_id: probe_metrics.measure(probe).overconfidence
            for probe in probes
            if probe.status == Status.STATUS_OK
        }
        return [by_id.get(row.id) for row in rows]

    def compute_metrics(self, overconfidence: Sequence[float | None], rows: Sequence[Trajectory]) -> dict[str, Any]:
        """Compute the step's metrics, under the names of the metrics file; means are over the probed rows."""
        values = [value for value in overconfidence if value is not None]
        mean = fmean(values) if values else None
        return {
            "probe_count": len(values),
            "probe_failed": len(_select_first(rows)) - len(values),
            "probe_overconfidence": mean,
            "probe_penalty": None if mean is None else probe_metrics.advantage_penalty(mean, self._coefficient),
        }


def _select_first(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Select the first row of each group."""
    first: dict[str, Trajectory] = {}
    for row in rows:
        first.setdefault(row.group_uid, row)
    return list(first.values())
