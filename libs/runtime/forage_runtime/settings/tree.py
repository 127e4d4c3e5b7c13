"""The whole tree of settings."""

from __future__ import annotations

import hashlib
import operator
from pathlib import Path

import yaml
from pydantic import model_validator

from forage_runtime.settings.base import Section
from forage_runtime.settings.console import ConsoleSettings
from forage_runtime.settings.data import DataSettings
from forage_runtime.settings.retriever import RetrieverSettings
from forage_runtime.settings.reward import RewardSettings
from forage_runtime.settings.rollout import RolloutSettings
from forage_runtime.settings.run import LocalSettings, ModelSettings, RedisSettings, RunSettings
from forage_runtime.settings.security import SecuritySettings, TlsSettings
from forage_runtime.settings.tracing import TracingSettings
from forage_runtime.settings.trainer import TrainerSettings
from forage_runtime.text.redaction import redact_settings
from forage_runtime.text.yaml_core import CoreDumper


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
    def _check_modes(self) -> Settings:
        """A mode of the whole run needs other settings: each with its value, and why."""
        one_machine = "trainer and engines share the GPUs of one machine, each in a Ray of its own or in none"
        repeatable: tuple[tuple[str, object, str], ...] = (
            ("trainer.batching", "strict", "which groups a step takes depends on time otherwise"),
            ("trainer.max_staleness", 0, "which policy samples depends on time otherwise"),
            ("rollout.weights.update", "drain", "a trajectory must have a single policy"),
            ("trainer.straggler_timeout_s", 0, "no group may be dropped for its time"),
            ("trainer.algorithm.probe_penalty.coef", 0, "probes that take too long are skipped"),
        )
        colocated: tuple[tuple[str, object, str], ...] = (
            ("trainer.batching", "strict", "one batch is sampled at a time, and a step takes all of it"),
            ("trainer.max_staleness", 0, "engines sleep while the trainer computes"),
            ("trainer.validation_mode", "paused", "nothing is answered while engines sleep"),
            ("trainer.algorithm.probe_penalty.coef", 0, "probes sample within the step, while engines sleep"),
            ("trainer.nnodes", 1, one_machine),
            ("trainer.ray.address", "", one_machine),
            ("rollout.ray_address", "", one_machine),
            ("rollout.engine.endpoint", "", "a remote endpoint cannot be put to sleep"),
        )
        modes = {"run.repeatable": repeatable} if self.run.repeatable else {}
        modes |= {"trainer.placement=colocated": colocated} if self.trainer.placement == "colocated" else {}
        for mode, (name, expected, reason) in ((mode, one) for mode, needed in modes.items() for one in needed):
            if (value := operator.attrgetter(name)(self)) != expected:
                raise ValueError(f"{mode} needs {name}={expected or repr(expected)}, not {value}: {reason}")
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

    def to_yaml(self, redacted: bool = False) -> str:
        """The tree as YAML, which `load_settings` reads back to an equal tree.

        Args:
            redacted: without credentials, for people and for other programs.
        """
        tree = self.model_dump(mode="json")
        return yaml.dump(redact_settings(tree) if redacted else tree, Dumper=CoreDumper, sort_keys=False)
