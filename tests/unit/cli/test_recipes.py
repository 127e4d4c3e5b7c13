"""Every recipe in configs/ resolves, names a missing file, and passes once its files exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forage_cli.datasets import countdown
from forage_cli.datasets.public_questions import SPLITS, convert_collection
from forage_cli.datasets.world import knowledge_graph, write
from forage_cli.local.preflight import check_files
from forage_common.errors import DataError
from forage_common.settings import Settings, load_settings

REPOSITORY = Path(__file__).parents[3]
RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))
NAMES = [recipe.stem for recipe in RECIPES]
PUBLISHED = [recipe for recipe in RECIPES if recipe.stem.startswith("search_r1")]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data sets of all recipes, made as a user makes them but small; any model is the shipped one."""
    folder = tmp_path_factory.mktemp("prepared")
    data = folder / "data"
    write.build_world(data / "world", 0)
    knowledge_graph.build_knowledge_graph(data / "knowledge_graph", 0)
    countdown.build_countdown(data / "countdown", {"train": 20, "test": 5}, [3], 99, 0)
    countdown.build_countdown(data / "countdown_tiny", {"train": 20, "test": 5}, [3], 99, 0, max_number=12)
    (folder / "rows.jsonl").write_text(json.dumps({"id": "0", "question": "who", "golden_answers": ["x"]}) + "\n")
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


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_missing_file_of_a_recipe_is_named_in_one_sentence(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(recipe, environ={})
    with pytest.raises(DataError) as error:
        check_files(settings)
    assert f"{settings.model.path} does not exist" in str(error.value)


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_the_longest_trajectory_fits_engine_and_trainer(recipe: Path) -> None:
    loaded_settings = load_settings(recipe, environ={})
    rollout = loaded_settings.rollout
    assert rollout.max_start_length <= rollout.max_prompt_length
    assert rollout.max_prompt_length + rollout.max_response_length <= rollout.engine.max_model_len
    turn = rollout.max_response_length + rollout.max_obs_length
    longest = rollout.max_start_length + rollout.max_turns * turn + rollout.max_response_length
    assert longest <= loaded_settings.trainer.actor.ppo_max_token_len_per_gpu


def test_sizes_of_one_published_recipe_differ_in_the_model_alone() -> None:
    def drop_named(settings: Settings) -> dict[str, object]:
        return settings.model_dump(exclude={"run": True, "model": True})

    by_size = {recipe.stem: load_settings(recipe, environ={}) for recipe in PUBLISHED}
    assert len(by_size) == 4
    for kind in ("grpo", "ppo"):
        small, large = (by_size[f"search_r1_nq_hotpotqa_{kind}_{size}"] for size in ("3b", "7b"))
        assert drop_named(small) == drop_named(large)
        assert (small.model.path, large.model.path) == (Path("models/Qwen2.5-3B"), Path("models/Qwen2.5-7B"))
    for name, settings in by_size.items():
        assert settings.run.id == name
