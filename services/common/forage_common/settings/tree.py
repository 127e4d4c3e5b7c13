"""The whole tree of settings."""

from __future__ import annotations

import yaml

from forage_common.settings.base import Section
from forage_common.settings.data import DataSettings
from forage_common.settings.retriever import RetrieverSettings
from forage_common.settings.reward import RewardSettings
from forage_common.settings.rollout import RolloutSettings
from forage_common.settings.run import ModelSettings, RedisSettings, RunSettings
from forage_common.settings.tracing import TracingSettings
from forage_common.settings.trainer import TrainerSettings


class Settings(Section):
    """All settings of a run."""

    run: RunSettings = RunSettings()
    redis: RedisSettings = RedisSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    retriever: RetrieverSettings = RetrieverSettings()
    reward: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    trainer: TrainerSettings = TrainerSettings()
    tracing: TracingSettings = TracingSettings()

    def to_yaml(self) -> str:
        """The tree as YAML, which `load_settings` reads back to an equal tree."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
