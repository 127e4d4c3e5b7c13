"""Replays of stored trajectories over real channels, and their comparison."""

from __future__ import annotations

import pytest
from stored_trajectories import build_stored, score

from forage_proto.v1.trajectory_pb2 import (
    Sampling,
    Score,
    Status,
)
from forage_records.replay import Comparison, build_prompt, find_divergence


def test_an_unseeded_trajectory_stays_unseeded() -> None:
    assert build_prompt(build_stored(sampling=Sampling(temperature=1.0)), "r").sampling.seed == 0


@pytest.mark.parametrize(
    ("response", "turn_ids", "place"),
    [
        ([10, 11, 90, 91, 12], [1, 1, -1, -1, 2], ""),
        ([10, 99, 90, 91, 12], [1, 1, -1, -1, 2], "turn 1"),
        ([10, 11, 90, 99, 12], [1, 1, -1, -1, 2], "observation of turn 1"),
        ([10, 11, 90, 91, 99], [1, 1, -1, -1, 2], "turn 2"),
        ([10, 11, 90, 91], [1, 1, -1, -1], "turn 2"),
        ([10, 11, 90, 91, 12, 92, 13], [1, 1, -1, -1, 2, -1, 3], "observation of turn 2"),
        ([], [], "turn 1"),
    ],
)
def test_the_place_where_trajectories_diverge_is_found(response: list[int], turn_ids: list[int], place: str) -> None:
    assert find_divergence(build_stored(), build_stored(token_ids=[1, 2, *response], turn_ids=turn_ids)) == place


def test_a_comparison_has_means_changes_and_the_largest_changes() -> None:
    comparison = Comparison()
    for number in range(9):
        comparison.add(
            build_stored(number), build_stored(number, score=score(0.2 + 0.1 * number, em=0.2, format=0.1 * number))
        )
    comparison.add(
        build_stored(), build_stored(status=Status.STATUS_TIMEOUT, score=Score(status=Status.STATUS_TIMEOUT))
    )
    total, form, em = (comparison.metrics[name] for name in ("score", "  format", "  em"))
    assert (total.count, total.changed) == (9, 8)
    assert total.before / 9 == pytest.approx(0.2)
    assert total.after / 9 == pytest.approx(0.6)
    assert (form.changed, em.changed) == (8, 0)
    assert sorted(number.rsplit("/", 3)[1] for _, number, *_ in comparison.largest) == ["4", "5", "6", "7", "8"]
    assert comparison.statuses == {("STATUS_OK", "STATUS_TIMEOUT"): 1}
