"""By how much an engine's log-probabilities may differ from the trainer's."""

from __future__ import annotations

import math

import pytest

from forage_proto.v1.trajectory_pb2 import Canary
from forage_rollout.vllm_start.vllm_args import is_exact
from forage_runtime.settings import EngineSettings
from forage_weights.rollout.canary import TOLERANCES, CanaryBounds

FLOAT, BRAIN = Canary(dtype="float32"), Canary(dtype="bfloat16")


def test_before_a_fresh_load_was_measured_a_load_in_place_may_differ_by_rounding() -> None:
    assert CanaryBounds("float32").find(FLOAT, is_fresh=False) == TOLERANCES["float32"].noise
    assert CanaryBounds("float32").find(FLOAT, is_fresh=True) == TOLERANCES["float32"].most


@pytest.mark.parametrize(("fresh", "bound"), [(0.0, 1e-4), (1e-5, 1e-4), (1e-4, 4e-4), (1e-3, 4e-3), (9.0, 5e-3)])
def test_then_by_four_times_that_up_to_what_two_libraries_may(fresh: float, bound: float) -> None:
    bounds = CanaryBounds("float32")
    bounds.fresh = fresh
    assert bounds.find(FLOAT, is_fresh=False) == pytest.approx(bound)


@pytest.mark.parametrize(("engine", "trainer"), [("bfloat16", FLOAT), ("float32", BRAIN), ("bfloat16", BRAIN)])
def test_the_coarser_type_decides(engine: str, trainer: Canary) -> None:
    assert CanaryBounds(engine).find(trainer, is_fresh=True) == TOLERANCES["bfloat16"].most


def test_a_type_that_is_not_known_has_the_widest_bound() -> None:
    assert CanaryBounds("float8_e4m3fn").find(Canary(), is_fresh=True) == TOLERANCES["bfloat16"].most


def test_where_the_engine_computes_otherwise_on_purpose_only_loads_in_place_are_bounded() -> None:
    bounds = CanaryBounds("float32", is_exact(EngineSettings(args={"quantization": "fp8"})))
    assert bounds.find(FLOAT, is_fresh=True) == math.inf
    bounds.fresh = 0.5
    assert bounds.find(FLOAT, is_fresh=False) == pytest.approx(2.0)
    assert is_exact(EngineSettings(args={"block_size": 16}))
