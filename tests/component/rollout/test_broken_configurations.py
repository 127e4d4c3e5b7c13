"""The service's checks before it starts name each mistake in one line, and let every recipe pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_configurations import assert_named, check_recipe, each_mistake, each_recipe, in_checkout, load

from forage_rollout.checks import list_checks
from forage_runtime.problems import find_problems

__all__ = ["in_checkout"]


@each_mistake("rollout")
def test_a_mistake_is_named_in_one_line(overrides: str, sentence: str, tmp_path: Path) -> None:
    assert_named(find_problems(list_checks(load(overrides, tmp_path))), sentence)


@each_recipe
def test_every_recipe_passes(recipe: Path) -> None:
    assert check_recipe(recipe, list_checks) == []


@pytest.mark.parametrize("value", ["1", "True"])
def test_a_longer_context_is_taken_where_vllm_takes_it(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", value)
    assert find_problems(list_checks(load("rollout.engine.max_model_len=4096", tmp_path))) == []
