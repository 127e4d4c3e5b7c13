"""The examples of docs/reference/rewards.md and docs/guide/write-a-reward.md work."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import read_blocks

from forage_reward.parsing.answers import extract_solution
from forage_reward.registry import REWARDS
from forage_reward.reward import Reward, RewardParams
from forage_reward.router import RewardRouter
from forage_reward.score import Component, Score, sum_components
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView
from forage_runtime.settings import load_settings

DOCS = Path(__file__).parents[3] / "docs"
PAGE, GUIDE = DOCS / "reference/rewards.md", DOCS / "guide/write-a-reward.md"


@pytest.mark.parametrize("text", [block.text for block in read_blocks(PAGE, "yaml")])
def test_every_example_of_settings_is_accepted(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    routes = load_settings(tmp_path / "s.yaml", environ={}).reward.routes
    assert routes
    RewardRouter(routes)


def test_the_example_reward_scores() -> None:
    (text,) = (block.text for block in read_blocks(GUIDE, "python") if "REWARD" in block.text)
    names = {kind.__name__: kind for kind in (RewardParams, TrajectoryView, GroundTruth, Score, Component, Reward)} | {
        "extract_solution": extract_solution,
        "sum_components": sum_components,
    }
    exec(text, names)
    bound = names["REWARD"].bind({"score": 2.0})  # type: ignore[attr-defined]
    assert bound(TrajectoryView((Span(Role.MODEL, "<answer>two words</answer>"),)), GroundTruth()).total == 2.0


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_is_in_the_table(name: str) -> None:
    assert f"\n| `{name}` | " in PAGE.read_text()
