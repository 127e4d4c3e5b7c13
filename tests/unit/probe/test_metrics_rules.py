"""When a probe says that the answer came before the thought."""

from __future__ import annotations

import pytest

from forage_probe.metrics import measure
from forage_proto.v1.probe_pb2 import Probed, ProbePoint
from forage_proto.v1.trajectory_pb2 import Status


@pytest.mark.parametrize(("correct", "rho", "premature"), [([2, 1, 4, 0, 3], 0.1, True), ([1, 0, 4, 2, 3], 0.6, False)])
def test_an_answer_is_premature_below_a_rank_correlation_of_two_fifths(
    correct: list[int], rho: float, premature: bool
) -> None:
    points = [ProbePoint(kept=place, correct=count, samples=5) for place, count in enumerate(correct)]
    found = measure(Probed(status=Status.STATUS_OK, cot_end=4, points=points))
    assert (found.rho, found.premature) == (pytest.approx(rho), premature)
