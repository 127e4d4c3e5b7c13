"""Every recipe in configs/ resolves, names a missing file, and passes once its files exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_cli.local.preflight import check_files
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings, load_settings

REPOSITORY = Path(__file__).parents[3]


RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))


NAMES = [recipe.stem for recipe in RECIPES]


PUBLISHED = [recipe for recipe in RECIPES if recipe.stem.startswith("search_r1")]


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_missing_file_of_a_recipe_is_named_in_one_sentence(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(recipe, environ={})
    with pytest.raises(UserError) as error:
        check_files(settings)
    assert f"model.path {settings.model.path} does not exist" in str(error.value).splitlines()[0]


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
