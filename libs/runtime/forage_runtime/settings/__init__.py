"""The one typed tree of settings.

Read from a YAML file, then the environment (`FORAGE__TRAINER__TOTAL_TRAINING_STEPS=10`), then the command line
(`trainer.total_training_steps=10`); later sources win. Unknown keys are errors that name the nearest known key.
Names follow verl's where verl has one.
"""

from forage_runtime.settings.actor import (
    ActorSettings,
    CriticSettings,
    LoraSettings,
    OptimSettings,
    PolicyLossSettings,
    TrainingEngineSettings,
)
from forage_runtime.settings.algorithm import (
    AdvantageEstimator,
    AlgorithmSettings,
    CorrectionSettings,
    KlControlSettings,
    OverlongSettings,
    RewardPlacement,
)
from forage_runtime.settings.console import ConsoleSettings
from forage_runtime.settings.data import DataSettings, TrainFile
from forage_runtime.settings.guards import GuardAction, GuardSettings
from forage_runtime.settings.loading import ENV_PREFIX, check_settings, load_settings, settings_from_arguments
from forage_runtime.settings.retriever import (
    EncoderPrecision,
    EncoderSettings,
    RerankSettings,
    RetrievalMode,
    RetrieverSettings,
)
from forage_runtime.settings.reward import RewardPart, RewardRoute, RewardSettings, UserReward
from forage_runtime.settings.rollout import EngineSettings, EnvironmentRoute, ReplicaSettings, RolloutSettings
from forage_runtime.settings.run import LocalGpuSettings, LocalSettings, ModelSettings, RedisSettings, RunSettings
from forage_runtime.settings.security import SecuritySettings, TlsSettings
from forage_runtime.settings.tracing import TracingSettings
from forage_runtime.settings.trainer import PublishSettings, TrainerSettings
from forage_runtime.settings.tree import Settings
