"""The whole tree of settings."""

from __future__ import annotations

import hashlib
from pathlib import Path

import yaml
from pydantic import model_validator

from forage_common.errors import SettingsError
from forage_common.settings.base import Section
from forage_common.settings.console import ConsoleSettings
from forage_common.settings.data import DataSettings
from forage_common.settings.retriever import RetrieverSettings
from forage_common.settings.reward import RewardSettings
from forage_common.settings.rollout import RolloutSettings
from forage_common.settings.run import LocalSettings, ModelSettings, RedisSettings, RunSettings
from forage_common.settings.security import SecuritySettings, TlsSettings
from forage_common.settings.tracing import TracingSettings
from forage_common.settings.trainer import TrainerSettings
from forage_common.text.redaction import redact_settings


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
    console: ConsoleSettings = ConsoleSettings()
    tls: TlsSettings = TlsSettings()
    security: SecuritySettings = SecuritySettings()
    local: LocalSettings = LocalSettings()

    @model_validator(mode="after")
    def _complete_redis(self) -> Settings:
        """With TLS to Redis its files are those of all wires, unless it has its own."""
        if self.redis.url.startswith("rediss"):
            own, update = self.redis, {}
            if own.ca_file is None:
                update["ca_file"] = self.tls.ca
            if own.cert_file is None and own.key_file is None:
                update |= {"cert_file": self.tls.cert, "key_file": self.tls.key}
            object.__setattr__(self, "redis", own.model_copy(update=update))
        return self

    @model_validator(mode="after")
    def _check_repeatable(self) -> Settings:
        rollout, trainer = self.rollout, self.trainer
        penalty = trainer.algorithm.probe_penalty
        needed: tuple[tuple[str, object, object, str], ...] = (
            ("trainer.batching", trainer.batching, "strict", "which groups a step takes depends on time otherwise"),
            ("trainer.max_staleness", trainer.max_staleness, 0, "which policy samples depends on time otherwise"),
            ("rollout.weights.update", rollout.weights.update, "drain", "a trajectory must have a single policy"),
            ("trainer.partial_groups", trainer.partial_groups, "wait", "no group may be dropped for its time"),
            ("trainer.algorithm.probe_penalty.coef", penalty.coef, 0, "probes that take too long are skipped"),
        )
        for name, value, expected, reason in needed if self.run.repeatable else ():
            if value != expected:
                raise ValueError(f"run.repeatable needs {name}={expected}, not {value}: {reason}")
        return self

    @model_validator(mode="after")
    def _check_local_gpus(self) -> Settings:
        overlap, gpus = self.local.gpus.find_overlap(), self.local.gpus
        is_shared = self.trainer.placement == "colocated" and gpus.rollout == gpus.trainer
        if overlap and not (is_shared and overlap.startswith("rollout and trainer")):
            raise ValueError(
                f"local.gpus: {overlap}: give each service GPUs of its own, or engines and trainer the same ones with "
                "trainer.placement=colocated"
            )
        return self

    @model_validator(mode="after")
    def _check_colocated(self) -> Settings:
        rollout, trainer = self.rollout, self.trainer
        one_machine = "trainer and engines share the GPUs of one machine, each in a Ray of its own or in none"
        needed: tuple[tuple[str, object, object, str], ...] = (
            (
                "trainer.batching",
                trainer.batching,
                "strict",
                "one batch is sampled at a time, and a step takes all of it",
            ),
            ("trainer.max_staleness", trainer.max_staleness, 0, "engines sleep while the trainer computes"),
            ("trainer.validation_mode", trainer.validation_mode, "paused", "nothing is answered while engines sleep"),
            (
                "trainer.algorithm.probe_penalty.coef",
                trainer.algorithm.probe_penalty.coef,
                0,
                "probes sample within the step, while engines sleep",
            ),
            ("trainer.nnodes", trainer.nnodes, 1, one_machine),
            ("trainer.ray.address", trainer.ray.address, "", one_machine),
            ("rollout.ray_address", rollout.ray_address, "", one_machine),
            ("rollout.engine.endpoint", rollout.engine.endpoint, "", "a remote endpoint cannot be put to sleep"),
        )
        for name, value, expected, reason in needed if trainer.placement == "colocated" else ():
            if value != expected:
                raise ValueError(
                    f"trainer.placement=colocated needs {name}={expected or repr(expected)}, not {value}: {reason}"
                )
        return self

    @property
    def runs_address(self) -> str:
        """The folder that the console shows: an address with a protocol, or an absolute path."""
        address = self.console.runs or str(self.run.dir)
        return address if "://" in address else str(Path(address).resolve())

    @property
    def runs_digest(self) -> str:
        """Tells consoles of other folders apart, and strangers nothing."""
        return hashlib.sha256(self.runs_address.encode()).hexdigest()[:16]

    def check_sampling(self) -> None:
        """Check that the trainer can score what the engine samples: ratios would carry any other difference.

        Raises:
            SettingsError: it cannot.
        """
        rollout = self.rollout
        # Below 0.01, down to 0.00001, vLLM samples at 0.01 whatever it is asked for; below that it is greedy.
        needed = {"temperature": (rollout.temperature >= 0.01, 1.0), "top_p": (rollout.top_p == 1, 1.0)}
        for name, (is_right, value) in (needed | {"top_k": (rollout.top_k <= 0, -1)}).items():
            if not is_right:
                raise SettingsError(
                    f"rollout.{name} = {getattr(rollout, name)} cannot be trained on: the trainer scores a token among "
                    f"all tokens, at the temperature at which it was sampled; set rollout.{name}={value}"
                )

    def check_trajectory_length(self) -> None:
        """Check that the longest trajectory fits into a micro-batch, which verl cannot split.

        Raises:
            SettingsError: it does not.
        """
        longest, (limit, name) = self.rollout.longest_trajectory, self.trainer.max_trajectory_length
        models = "the critic takes" if "critic" in name else "the actor and the reference policy take"
        if longest > limit:
            raise SettingsError(
                f"a trajectory may have {longest} tokens (rollout: max_start_length {self.rollout.max_start_length}, "
                f"{self.rollout.max_turns + 1} generations of {self.rollout.max_response_length}, "
                f"{self.rollout.max_turns} observations of {self.rollout.max_obs_length}), and {name} = {limit} "
                f"is the most that {models}: raise it to {longest}, or make trajectories shorter"
            )

    def to_yaml(self, redacted: bool = False) -> str:
        """The tree as YAML, which `load_settings` reads back to an equal tree.

        Args:
            redacted: without credentials, for people and for other programs.
        """
        tree = self.model_dump(mode="json")
        return yaml.safe_dump(redact_settings(tree) if redacted else tree, sort_keys=False)
