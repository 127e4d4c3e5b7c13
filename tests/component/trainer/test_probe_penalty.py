"""The penalty for overconfidence where the rollout service is away."""

from __future__ import annotations

from pathlib import Path

import pytest
from arrived_groups import arrive, arrive_alone
from trainer_parts import build_trajectory, make_group

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.settings import load_settings
from forage_trainer.validation.probe_penalty import ProbePenalty


def test_only_the_first_of_a_group_are_probed_and_failures_are_counted(tmp_path: Path) -> None:
    unreachable = ["rollout.grpc_address=127.0.0.1:9", "trainer.probe.timeout_s=0.3"]
    settings = load_settings(
        None, [*unreachable, "model.path=" + str(tmp_path), "trainer.algorithm.probe_penalty.coef=0.5"], {}
    )
    penalty = ProbePenalty(settings)
    rows = [
        *arrive(make_group("a", [0.0, 1.0])).trajectories,
        *arrive(make_group("b", [1.0, 0.0])).trajectories,
        arrive_alone(build_trajectory("a", 2, 1.0)),
    ]
    sure = penalty.measure_overconfidence(rows, Policy(version=1, epoch=1), lambda: None)
    assert sure == [None] * 5
    assert penalty.compute_metrics(sure, rows) == {
        "probe_count": 0, "probe_failed": 2, "probe_overconfidence": None, "probe_penalty": None,
    }  # fmt: skip
    known = penalty.compute_metrics([0.5, None, -0.1, None, None], rows)
    assert known["probe_failed"] == 0
    assert (known["probe_overconfidence"], known["probe_penalty"]) == (pytest.approx(0.2), pytest.approx(0.1))
