"""Recipes of `make bench-learning`: settings over a file of configs/, and the gain that every seed must reach."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from forage_cli.datasets import countdown
from forage_cli.local.home import find_home
from forage_cli.local.stack import shift_ports
from forage_runtime.settings import Settings, load_settings

OPENING = "data/opened_thought"
"""The tiny policy with a chat template that opens the thought."""

QUESTIONS = 300
"""Held-out questions that are asked before and after."""


@dataclass(frozen=True)
class Recipe:
    """`margin`: the least gain in greedy exact match that counts as learning; None where none is asked for."""

    name: str
    title: str
    config: str
    margin: float | None
    overrides: tuple[str, ...]

    @property
    def file(self) -> Path:
        return find_home() / "configs" / self.config

    def settings(self, runs: Path, seed: int, base_port: int) -> tuple[str, ...]:
        """The overrides for `forage demo`, beside the file."""
        shared = (f"run.dir={runs / self.name}", f"run.id=seed-{seed}", f"run.seed={seed}")
        return (*shared, f"data.val_max_samples={QUESTIONS}", *shift_ports(base_port), *self.overrides)

    def prepare(self) -> None:
        """Make what a recipe needs and what is missing; world facts make themselves."""
        if self.name == "grpo_opening":
            model = find_home() / "models/tiny-policy"
            folder = shutil.copytree(model, find_home() / OPENING, dirs_exist_ok=True)
            template = (model / "chat_template.jinja").read_text(encoding="utf-8").rstrip()
            opened = "{% if add_generation_prompt %}<think>{% endif %}"
            (folder / "chat_template.jinja").write_text(template + opened, encoding="utf-8")
        folder = find_home() / "data" / "countdown_tiny"
        if self.name == "countdown" and not (folder / "manifest.json").is_file():
            countdown.build_countdown(folder, {"train": 4000, "test": 400}, [3], 99, 0, max_number=12)

    def resolved(self, runs: Path, seed: int, base_port: int) -> Settings:
        return load_settings(self.file, self.settings(runs, seed, base_port))


_GRPO = ("trainer.total_training_steps=16", "trainer.actor.optim.lr=3e-4")

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("grpo", "GRPO", "demo.yaml", 0.8, _GRPO),
        Recipe(
            "ppo",
            "PPO with critic",
            "demo.yaml",
            0.8,
            (
                *_GRPO,
                "trainer.algorithm.adv_estimator=gae",
                "trainer.critic_warmup=2",
                "trainer.critic.optim.lr=1e-3",
            ),
        ),
        Recipe(
            "grpo_multiturn",
            "multi-turn GRPO",
            "demo.yaml",
            0.75,
            (*_GRPO, "trainer.algorithm.adv_estimator=grpo_multiturn", "reward.routes.world_facts.name=structured"),
        ),
        Recipe(
            "grpo_opening", "GRPO, thought opened by the template", "demo.yaml", 0.8, (*_GRPO, f"model.path={OPENING}")
        ),
        Recipe("countdown", "countdown, GRPO", "countdown_tiny.yaml", 0.15, ()),
        Recipe(
            "grpo_unmasked",
            "GRPO, observations trained on",
            "demo.yaml",
            None,
            (*_GRPO, "trainer.algorithm.state_masking=false"),
        ),
    )
}
MASKING = ("grpo", "grpo_unmasked")
"""The two recipes that differ in `state_masking` alone."""
