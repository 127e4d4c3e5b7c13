"""The measures of probes: tables, bounds that hold for any counts, and what is undefined."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_probe import metrics
from forage_proto.v1.probe_pb2 import AnswerCount, Probed, ProbePoint
from forage_proto.v1.trajectory_pb2 import Status

TABLE = Path(__file__).parents[2] / "data" / "probe" / "metrics.jsonl"


def build_point(kept: int, correct: int, samples: int, **answers: int) -> ProbePoint:
    counts = [AnswerCount(answer=answer, count=count) for answer, count in answers.items()]
    return ProbePoint(kept=kept, correct=correct, samples=samples, answers=counts)


def build_probed(correct: list[int], samples: int, own: bool = True) -> Probed:
    points = [
        build_point(10 * place, count, samples, **{k: n for k, n in (("yes", count), ("no", samples - count)) if n})
        for place, count in enumerate(correct)
    ]
    return Probed(status=Status.STATUS_OK, correct=own, cot_end=points[-1].kept, points=points)


@pytest.mark.parametrize(
    "row", [json.loads(line) for line in TABLE.read_text().splitlines()], ids=lambda row: row["why"]
)
def test_measures_equal_the_table(row: dict[str, Any]) -> None:
    probe = build_probed(row["correct"], row["samples"], row["own"])
    found, sets = metrics.measure(probe), metrics.summarise([probe])
    assert found.confidence == pytest.approx(row["confidence"])
    assert found.overconfidence == pytest.approx(row["overconfidence"], abs=1e-6)
    assert metrics.advantage_penalty(found.overconfidence, row["coefficient"]) == pytest.approx(row["penalty"])
    assert found.rho == (row["rho"] if row["rho"] is None else pytest.approx(row["rho"]))
    assert found.premature is (None if row["rho"] is None else row["rho"] < 0.4)
    assert found.auc_gap == pytest.approx(row["auc_gap"], abs=1e-6)
    assert found.norm_aoc == (row["norm_aoc"] if row["norm_aoc"] is None else pytest.approx(row["norm_aoc"]))
    assert set(sets) == {"all", "correct" if row["own"] else "incorrect"}
    for one in sets.values():
        assert one.mean_confidence == pytest.approx(row["mean"])
        assert one.confidence_at == pytest.approx(row["confidence"])
        assert one.overconfidence == pytest.approx(row["overconfidence"], abs=1e-6)
        assert one.count == 1


@given(st.integers(1, 200), st.data())
def test_the_wilson_interval_equals_its_formula_and_contains_the_share(samples: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, samples))
    low, high = metrics.wilson_interval(correct, samples)
    z, share = 1.959963984540054, correct / samples
    centre = (share + z * z / (2 * samples)) / (1 + z * z / samples)
    half = z / (1 + z * z / samples) * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples**2))
    assert (low, high) == pytest.approx((centre - half, centre + half), abs=1e-9)
    assert -1e-9 <= low <= share <= high <= 1 + 1e-9


@given(st.lists(st.integers(0, 20), min_size=2, max_size=15))
def test_measures_are_bounded_and_change_sign_when_the_curve_is_reversed(correct: list[int]) -> None:
    there, back = metrics.measure(build_probed(correct, 20)), metrics.measure(build_probed(correct[::-1], 20))
    assert back.overconfidence == pytest.approx(-there.overconfidence, abs=1e-9)
    assert (there.rho is None) == (len(set(correct)) == 1)
    if there.rho is not None and back.rho is not None:
        assert back.rho == pytest.approx(-there.rho)
        assert -1 - 1e-9 <= there.rho <= 1 + 1e-9
    assert there.aoc is not None
    assert 0 <= there.aoc <= 1
    if len(set(correct)) > 1:
        rising = metrics.measure(build_probed(sorted(correct), 20))
        assert rising.overconfidence < 0 < rising.auc_gap
        assert rising.rho is not None
        assert rising.rho > 0


@pytest.mark.parametrize(
    ("points", "area"),
    [
        # The answer stands from the start; it never does before the end; it does from the middle.
        ([build_point(0, 0, 9, a=9), build_point(5, 0, 9, a=9), build_point(10, 0, 9, a=9)], 0.0),
        ([build_point(0, 0, 9, b=9), build_point(5, 0, 9, b=9), build_point(10, 0, 9, a=9)], 0.75),
        ([build_point(0, 0, 9, b=9), build_point(5, 0, 9, a=9), build_point(10, 0, 9, a=9)], 0.25),
        # A truncation counts by the length it stands for: 1 token here, 9 there.
        ([build_point(0, 0, 9, b=9), build_point(1, 0, 9, a=9), build_point(10, 0, 9, a=9)], 0.05),
        ([build_point(0, 0, 9, b=9), build_point(9, 0, 9, a=9), build_point(10, 0, 9, a=9)], 0.45),
        # As frequent as another is the same; less frequent is not; no answer is another one.
        ([build_point(0, 0, 8, b=4, a=4), build_point(10, 0, 8, a=5, b=3)], 0.0),
        ([build_point(0, 0, 9, b=5, a=4), build_point(10, 0, 9, a=5, b=4)], 0.5),
        ([build_point(0, 0, 9, a=4), build_point(10, 0, 9, a=9)], 0.5),
        ([build_point(0, 0, 9), build_point(10, 0, 9, a=5)], 0.5),
        # No answer after the whole thought, and no thought: undefined.
        ([build_point(0, 0, 9, a=9), build_point(10, 0, 9, a=4)], None),
        ([build_point(0, 0, 9, a=9), build_point(0, 0, 9, a=9)], None),
    ],
)
def test_the_area_over_the_curve_is_the_share_of_the_thought_before_the_final_answer(
    points: list[ProbePoint], area: float | None
) -> None:
    assert metrics.area_over_curve(points) == (area if area is None else pytest.approx(area))


def test_sets_depend_on_the_trajectorys_answer_and_exclude_failed_probes() -> None:
    lost = Probed(status=Status.STATUS_TIMEOUT, correct=True)
    sets = metrics.summarise(
        [build_probed([0, 10], 10), build_probed([0, 8], 10), build_probed([2, 0], 10, own=False), lost]
    )
    assert {name: one.count for name, one in sets.items()} == {"all": 3, "correct": 2, "incorrect": 1}
    assert sets["correct"].confidence_at == pytest.approx([0.0, 0.9])
    assert sets["all"].mean_confidence == pytest.approx(2.0 / 6)
    assert sets["correct"].premature == 0.0
    assert sets["incorrect"].premature == 1.0
    (low, high) = sets["correct"].intervals[1]
    assert (low, high) == pytest.approx((0.8, 1.0))
    assert sets["incorrect"].intervals[1] == metrics.wilson_interval(
        0, 10
    )  # of a single one there is nothing to resample
    assert metrics.summarise([lost]) == {}
