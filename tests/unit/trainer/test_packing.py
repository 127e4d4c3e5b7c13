"""Which differences between packed and other rows rounding explains, and which rows show them."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoConfig

from forage_trainer.engine.packing import PackedDifferences, build_probe, choose_places, draw_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("differences", "dtype", "problem"),
    [
        (PackedDifferences(3e-7, 2e-7, 0, 0), torch.float32, None),
        (PackedDifferences(3e-7, 2e-7, 2e-7, 2e-7), torch.float32, None),
        (PackedDifferences(0.05, 0.03, 0, 0), torch.bfloat16, None),
        (PackedDifferences(0.05, 0.03, 0.02, 0.01), torch.bfloat16, None),
        (
            PackedDifferences(3e-7, 0.0003, 0.0005, 0),
            torch.float32,
            r"before it: off by 0\.0005 .* explains 1e-05",
        ),
        (PackedDifferences(0.05, 0.03, 0.02, 0), torch.bfloat16, r"the row before it: off by 0\.02 .* explains 0\.008"),
        (PackedDifferences(0.002, 3e-7, 0, 0), torch.float32, r"attention .* is not the model's: off by 0\.002"),
        (PackedDifferences(0.3, 0.03, 0, 0), torch.bfloat16, r"attention .* is not the model's: off by 0\.3"),
        (PackedDifferences(3e-7, 0.002, 0, 0), torch.float32, r"depends on its place: off by 0\.002"),
        (PackedDifferences(float("nan"), 0, 0, 0), torch.float32, "attention"),
    ],
)
def test_what_rounding_does_not_explain_is_named(
    differences: PackedDifferences, dtype: torch.dtype, problem: str | None
) -> None:
    found = differences.find_problem(dtype)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(problem, found)


@pytest.mark.parametrize(
    ("more", "budget", "length"),
    [
        ({"sliding_window": 64, "use_sliding_window": True}, 512, 88),
        ({"sliding_window": 4096, "use_sliding_window": True}, 512, 42),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_position_embeddings": 512}, 8192, 42),
        ({}, 512, 42),
    ],
)
def test_the_second_row_is_longer_than_a_window_that_rows_can_exceed(
    more: dict[str, int], budget: int, length: int
) -> None:
    config = AutoConfig.for_model("qwen2", vocab_size=50, **more)
    first, other, second = draw_rows(config, budget, CPU)
    assert len(first) == len(other)
    assert not torch.equal(first, other)
    assert len(second) == length
    assert all(
        torch.equal(one, again)
        for one, again in zip(draw_rows(config, budget, CPU), (first, other, second), strict=True)
    )


def test_the_compared_tokens_are_those_of_the_row() -> None:
    rows = [torch.arange(100, 157), torch.arange(200, 288)]
    packed, places = build_probe(rows, True, 1)
    assert torch.equal(packed["input_ids"][0, places], rows[1][choose_places(rows[1])])
    assert packed["position_ids"][0, places].tolist() == [*range(24), *range(64, 88)]
    padded, places = build_probe(rows[::-1], False, 0)
    assert torch.equal(padded["input_ids"][0, places], rows[1][choose_places(rows[1])])
