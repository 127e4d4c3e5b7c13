"""The service's checks before it starts name each mistake in one line, and let every recipe pass."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
from broken_configurations import assert_named, check_recipe, each_mistake, each_recipe, in_checkout, load

from forage_runtime.problems import find_problems
from forage_trainer.checks import list_checks, list_remarks

__all__ = ["in_checkout"]


@each_mistake("trainer")
def test_a_mistake_is_named_in_one_line(overrides: str, sentence: str, tmp_path: Path) -> None:
    assert_named(find_problems(list_checks(load(overrides, tmp_path))), sentence)


@each_recipe
def test_every_recipe_passes(recipe: Path) -> None:
    assert check_recipe(recipe, list_checks) == []


def test_questions_are_read_and_measured_as_a_start_does(tmp_path: Path) -> None:
    row = {
        "data_source": "world_facts",
        "prompt": [{"role": "user", "content": "Where is Oslo?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Norway"]}},
        "extra_info": {"index": 0, "split": "train"},
    }
    file = tmp_path / "q.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    files = f"data.train_files=[{file}] data.val_files=[{file}]"
    sizes = "data.train_batch_size=1 trainer.actor.ppo_mini_batch_size=1"
    assert list(list_remarks(load(f"{files} {sizes}", tmp_path))) == []
    too_long = load(f"{files} {sizes} rollout.max_start_length=1", tmp_path)
    assert_named(find_problems([lambda: list(list_remarks(too_long))]), "raise rollout.max_start_length")
