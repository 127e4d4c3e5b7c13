"""Recipes pass every check once their files are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forage_cli.datasets import countdown
from forage_cli.datasets.public_questions import SPLITS, convert_collection
from forage_cli.datasets.world import knowledge_graph, write
from forage_cli.local.preflight import check_files
from forage_runtime.settings import load_settings

REPOSITORY = Path(__file__).parents[3]


RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))


QUESTIONS = 512
"""The largest batch of a recipe: with fewer questions it could not train."""


NAMES = [recipe.stem for recipe in RECIPES]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data sets of all recipes, made as a user makes them but small; any model is the shipped one."""
    folder = tmp_path_factory.mktemp("prepared")
    data = folder / "data"
    write.build_world(data / "world", 0)
    knowledge_graph.build_knowledge_graph(data / "knowledge_graph", 0)
    countdown.build_countdown(data / "countdown", {"train": QUESTIONS, "test": 5}, [3], 99, 0)
    countdown.build_countdown(data / "countdown_tiny", {"train": QUESTIONS, "test": 5}, [3], 99, 0, max_number=12)
    rows = [{"id": str(number), "question": "who", "golden_answers": ["x"]} for number in range(QUESTIONS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source, splits in SPLITS.items():
        convert_collection(source, dict.fromkeys(splits, folder / "rows.jsonl"), data / source)
    (data / "wiki-18").mkdir()
    (data / "wiki-18" / "corpus.jsonl").write_text('{"id": "0", "contents": "\\"T\\"\\nt"}\n')
    for place in {load_settings(recipe, environ={}).model.path for recipe in RECIPES}:
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).symlink_to(REPOSITORY / "models" / "tiny-policy")
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    return folder


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_recipe_passes_every_check_once_its_files_are_there(
    recipe: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    check_files(load_settings(recipe, environ={}))
