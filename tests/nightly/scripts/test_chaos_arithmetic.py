"""What a chaos run computes: the deck of faults, percentiles, costs and the training time that is left."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from chaos import arithmetic
from chaos.arithmetic import Cost
from chaos.disks import SmallDisk, cut_end, flip_bit
from chaos.driver import Plan, deal_hands
from chaos.episode import Incident, Outcome, Tally
from chaos.kinds import KINDS, RANK_KINDS, STORE_KINDS, SUPERVISOR, Strike
from chaos.report import find_slow_kinds, summarize
from chaos.stack import Steps
from chaos.transports import TRANSPORTS


def build_strike(kind: str, back_s: float, recovery_s: float, **fields: object) -> Strike:
    strike = Strike(kind, "", 1000.0, lambda: True)
    strike.back_s, strike.recovery_s = back_s, recovery_s
    for name, value in fields.items():
        setattr(strike, name, value)
    return strike


def build_incident(cost: Cost, *strikes: Strike) -> Incident:
    return Incident(list(strikes), 1000.0, 0, 0, {}, cost)


def test_percentiles_are_values_that_were_measured() -> None:
    assert arithmetic.find_percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert arithmetic.find_percentile(range(1, 101), 0.99) == 99
    assert arithmetic.find_percentile([7.0], 0.99) == 7.0
    assert arithmetic.find_percentile([], 0.5) is None


def test_the_cost_of_a_killed_trainer_is_its_outage_and_the_steps_since_its_checkpoint() -> None:
    # Of 20 s lost, two steps of 1 s were taken again: 18 s would have been lost with any step.
    killed = Cost(lost_s=20.0, redone=2, restarted_trainer=True)
    assert killed.outage_s(1.0) == 18.0
    assert killed.repeated_steps(save_freq=1) == pytest.approx(1.2)
    assert killed.repeated_steps(save_freq=5) == pytest.approx(3.2)
    assert killed.project_s(1.0, save_freq=5, step_s=60.0) == pytest.approx(18.0 + 192.0)
    damaged = Cost(20.0, 2, restarted_trainer=True, older_checkpoint=True)
    assert damaged.repeated_steps(save_freq=5) == pytest.approx(8.2)
    engine = Cost(12.0, 0, restarted_rollout=True)
    assert engine.project_s(1.0, save_freq=5, step_s=60.0) == 12.0 + 30.0
    assert Cost(-0.3, 0).project_s(1.0, 5) == 0.0, "faster than undisturbed steps: no gain"


def test_the_effective_time_is_the_share_of_the_undisturbed_speed() -> None:
    assert arithmetic.compute_effective_time(0.1, 60.0, 60.0) == pytest.approx(1 / 1.1)
    assert arithmetic.compute_effective_time(0.05, 0.0, 60.0) == 1.0
    assert arithmetic.compute_effective_time(0.1, 66.0, 60.0) > 0.9 > arithmetic.compute_effective_time(0.1, 67.0, 60.0)
    assert arithmetic.average_over_kinds([[1.0, 1.0, 1.0, 1.0], [3.0]]) == 2.0, "kinds count the same"
    assert arithmetic.average_over_kinds([]) == 0.0


def test_pauses_stay_in_their_range_and_are_mostly_short() -> None:
    generator = random.Random(1)
    pauses = sorted(arithmetic.draw_pause_s(generator, 1.0, 60.0) for _ in range(1000))
    assert pauses[0] >= 1.0
    assert pauses[-1] <= 60.0
    assert 6.0 < pauses[500] < 10.0


def test_200_faults_have_every_kind_about_as_often() -> None:
    hands = deal_hands(Plan(200, 3, Path()))
    assert sum(map(len, hands)) == 200
    counts = Counter(kind for hand in hands for kind in hand)
    assert counts.keys() == set(KINDS)
    assert min(counts.values()) >= 4
    assert max(counts.values()) <= 8
    assert all(hand[-1] == SUPERVISOR for hand in hands)
    for hand in hands:
        assert not set(hand) & set(RANK_KINDS) or set(hand) <= {*RANK_KINDS, SUPERVISOR}
    stored = {TRANSPORTS[number % 4] for number, hand in enumerate(hands) if set(hand) & set(STORE_KINDS)}
    assert stored == {"s3"}, "only where there is a store, something happens to it"
    assert not {*STORE_KINDS} & {kind for hand in deal_hands(Plan(40, 3, Path())) for kind in hand}


def test_a_seed_deals_the_same_hands_and_another_one_others() -> None:
    hands = [deal_hands(Plan(40, seed, Path())) for seed in (5, 5, 6)]
    assert hands[0] == hands[1] != hands[2]
    only = deal_hands(Plan(4, 0, Path(), kinds=["kill-redis"]))
    assert only == [["kill-redis", "kill-redis", "kill-redis", SUPERVISOR]]


def test_the_report_has_times_by_kind_and_the_projection() -> None:
    tally = Tally(calm_s=20.0, calm_steps=20)
    for seconds in (2.0, 4.0):
        strike = build_strike("kill-dispatcher", seconds, seconds + 1)
        tally.incidents.append(build_incident(Cost(seconds, 0, restarted_rollout=True), strike))
    pair = [
        build_strike("kill-trainer", 99.0, 99.0, overlaps=True),
        build_strike("kill-redis", 99.0, 99.0, overlaps=True),
    ]
    tally.incidents.append(build_incident(Cost(12.0, 2, restarted_trainer=True), *pair))
    tally.incidents.append(build_incident(Cost(30.0, 0), build_strike("kill-trainer", 25.0, 26.0)))
    tally.outcomes.append(Outcome(issued=40, trained=40, steps=10))
    report = summarize(tally, seed=7, save_freq=5)
    result = report.result
    assert (result["kills"], result["lost"], result["duplicated"], result["hung"], result["seed"]) == (5, 0, 0, 0, 7)
    assert result["recovery_p50_s"] == {"kill-dispatcher": 3.0, "kill-trainer": 26.0}, "overlapping faults are left out"
    assert result["recovery_p99_s"]["kill-dispatcher"] == 5.0
    assert find_slow_kinds(result) == ["kill-trainer: back after 25.0 s, bar 20 s"]
    # Kinds: dispatcher 3 and 30 s, trainer (6 + 30) / 2, redis 6; at 60 s a step: 33, ((10 + 192) / 2 + 30) / 2, 101.
    assert result["cost_s"] == 9.0
    assert result["projected_cost_s"] == pytest.approx((33 + 65.5 + 101) / 3, abs=0.1)
    assert result["effective_training_time_10"] == pytest.approx(60 / (60 + 6.65), abs=1e-3)
    assert result["effective_training_time_10_measured"] == pytest.approx(1 / 1.9, abs=1e-3)
    assert report.failures == []
    json.dumps(result)


def test_what_is_lost_trained_twice_or_hung_fails_the_run() -> None:
    tally = Tally(calm_s=1.0, calm_steps=1)
    tally.incidents.append(build_incident(Cost(1e4, 0), build_strike("kill-gcs", 1.0, 1.0, hung=True)))
    tally.outcomes += [Outcome(lost=2, duplicated=1), Outcome(problem="the run ended with code 1")]
    failures = summarize(tally, 0, 5).failures
    assert failures[:4] == ["2 lost", "1 duplicated", "1 hung", "the run ended with code 1"]
    assert "projected effective training time" in failures[4]


def test_a_small_disk_is_filled_and_emptied(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk", 1)
    if disk.problem:
        assert "root" in disk.problem
        pytest.skip(disk.problem)
    try:
        for _ in range(2):
            disk.fill()
            with pytest.raises(OSError, match="No space left"):
                (tmp_path / "disk/more").write_bytes(b"x" * 5000)
            disk.empty()
            (tmp_path / "disk/more").write_bytes(b"x" * 5000)
            (tmp_path / "disk/more").unlink()
    finally:
        disk.unmount()


def test_one_bit_is_flipped_and_an_end_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(10))
    flip_bit(file, 3, 2)
    assert file.read_bytes() == b"\0\0\0\4" + bytes(6)
    assert [cut_end(file, 4), cut_end(file, 40)] == [4, 6]
    assert file.read_bytes() == b""


def test_steps_that_are_taken_again_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    steps = Steps(file)
    steps.poll()
    lines = [json.dumps({"step": step, "time": 10.0 + step}) + "\n" for step in (1, 2, 3)]
    file.write_text("".join(lines) + '{"step": 4, "ti')
    steps.poll()
    assert (steps.last, steps.redone) == (3, 0)
    rewound = tmp_path / "new"
    rewound.write_text("".join(lines[:2]))
    rewound.replace(file)
    with file.open("a") as more:
        more.write("".join(json.dumps({"step": step, "time": 30.0 + step}) + "\n" for step in (3, 4)))
    steps.poll()
    steps.poll()
    assert (steps.last, steps.redone, steps.times[3]) == (4, 1, 33.0)
