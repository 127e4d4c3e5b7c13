"""The service's checks before it starts name each mistake in one line, and let every recipe pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_configurations import BROKEN, RECIPES, REPOSITORY, assert_named, check_recipe, load

from forage_retriever.checks import list_checks
from forage_runtime.problems import find_problems


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize(("overrides", "sentence"), BROKEN["retriever"].items())
def test_a_mistake_is_named_in_one_line(overrides: str, sentence: str, tmp_path: Path) -> None:
    assert_named(find_problems(list_checks(load(overrides, tmp_path))), sentence)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_every_recipe_passes(recipe: Path) -> None:
    assert check_recipe(recipe, list_checks, "retriever.index=null", "retriever.encoder.model=minilm") == []
