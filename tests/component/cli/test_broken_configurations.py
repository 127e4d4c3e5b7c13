"""Broken configurations are each named in one line, and none passes; recipes pass once their files are there.

What the services name is in tests/component/<service>/test_broken_configurations.py, each in its environment.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from broken_configurations import BROKEN, RECIPES, REPOSITORY, assert_named, each_mistake, each_recipe, load

from forage_cli.datasets import countdown
from forage_cli.datasets.public_questions import SPLITS, convert_collection
from forage_cli.datasets.world import knowledge_graph, write
from forage_cli.local import preflight
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.problems import find_problems
from forage_runtime.settings import load_settings

TOGETHER = (
    "rollout.n=1",
    "reward.routes.x.name=no_such_reward",
    "retriever.index=/no/index",
    "rollout.max_prompt_length=100000",
)
QUESTIONS = 512
"""The largest batch of a recipe: with fewer questions it could not train."""


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


@each_mistake("settings")
def test_what_no_file_can_mend_is_named_first(overrides: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        load(overrides, tmp_path)
    assert_named(str(error.value).splitlines(), sentence)


@each_mistake("files")
def test_a_mistake_in_files_or_between_settings_is_named_in_one_line(
    overrides: str, sentence: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    overrides = overrides.replace("{train}", '["data/world/train.parquet"]')
    assert_named(find_problems([lambda: preflight.check_files(load(overrides, tmp_path))]), sentence)


def test_every_file_of_questions_that_is_missing_is_named(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    settings = load("data.train_files=[/no/a.parquet,/no/b.parquet] data.val_files=[/no/c.parquet]", tmp_path)
    problems = find_problems([lambda: preflight.check_files(settings)])
    assert [problem.split()[2] for problem in problems] == ["/no/a.parquet", "/no/b.parquet", "/no/c.parquet"]


def test_services_are_asked_in_their_environments_and_all_problems_come_at_once(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of the shell were resolved before, and count no second time. `test_command` asks the trainer, too."""
    monkeypatch.chdir(prepared)
    monkeypatch.setattr(preflight, "CHECKED", preflight.CHECKED[:3])
    monkeypatch.setenv("FORAGE__ROLLOUT__TOP_K", "5")
    expected = {name: said for part in BROKEN.values() for name, said in part.items() if name in TOGETHER}
    with pytest.raises(UserError) as error:
        preflight.check_settings(load(" ".join(expected), tmp_path))
    lines = str(error.value).splitlines()
    assert len(lines) == len(expected) == len(TOGETHER), lines
    assert all(sum(sentence in line for line in lines) == 1 for sentence in expected.values()), lines


def test_there_are_forty() -> None:
    assert sum(map(len, BROKEN.values())) >= 40


@each_recipe
def test_a_recipe_passes_every_check_once_its_files_are_there(
    recipe: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    preflight.check_files(load_settings(recipe, environ={}))
