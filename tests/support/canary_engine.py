"""An engine whose loads in place can be made wrong, and policies that are announced with a canary."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from policy_places import ANYWHERE_HERE

from forage_proto.v1.trajectory_pb2 import Canary, Policy
from forage_rollout.engine import instance
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import GenerationRequest
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_runtime.settings.rollout import WeightSettings

VERSIONS = itertools.count(1)
_EXTENSION, _VARIABLE = "faulty_loads.FaultyWorkerExtension", "FORAGE_TEST_FAULT"
"""By name: `faulty_loads` is for workers alone, and makes the loads of whoever imports it wrong."""


def score(folder: Path) -> Canary:
    """What a trainer gives, for rows of the longest and the shortest size."""
    import torch
    from scored_rows import build_canary, draw_rows
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return build_canary(model, draw_rows(250, (64, 64, 30, 2)))


@dataclass
class CanaryEngine:
    """models: three folders, a, b and c; the engine was started with a. fault: the file that names the fault.

    initial: the canary's difference of the policy that the engine was started with, once that is loaded.
    """

    engine: VllmEngine
    models: dict[str, Path]
    fault: Path
    canaries: dict[str, Canary] = field(default_factory=dict)
    initial: float | None = None

    def describe(self, name: str, canary_of: str = "", version: int | None = None) -> Policy:
        """A policy, announced with the log-probabilities of its own, or of another one."""
        digest = hashlib.sha256((self.models[name] / "model.safetensors").read_bytes()).hexdigest()
        version = next(VERSIONS) if version is None else version
        policy = Policy(version=version, epoch=1, uri=str(self.models[name]), digest=digest)
        policy.canary.CopyFrom(self.canaries[canary_of or name])
        return policy

    async def load_wrongly(self, name: str, fault: str) -> Policy:
        policy = self.describe(name)
        self.fault.write_text(fault)
        try:
            await self.engine.load_policy(policy)
        finally:
            self.fault.write_text("")
        return policy

    def load_in_place_again(self) -> None:
        """Forget that loads in place were wrong."""
        self.engine._loader._loads_in_place = True

    async def generate(self, tokens: int = 8) -> list[tuple[int, int, int, int]]:
        """(version, epoch, begin, end) of what was sampled."""
        return (await self.engine.generate(GenerationRequest([20, 30, 40], tokens, 1.0, 1.0, -1, 1))).versions

    async def generate_tokens(self, tokens: int) -> list[int]:
        """Tokens that one seed samples."""
        return (await self.engine.generate(GenerationRequest([20, 30, 40], tokens, 1.0, 1.0, -1, 1))).token_ids


@asynccontextmanager
async def run_canary_engine(
    make_model: Callable[[int], Path],
    tmp_path_factory: pytest.TempPathFactory,
    update: Literal["in_flight", "drain"] = "in_flight",
    **sizes: Any,
) -> AsyncIterator[CanaryEngine]:
    """Run the engine within the block.

    Args:
        update: as of `rollout.weights.update`.
        sizes: settings of `rollout.engine` that differ.
    """
    fault = tmp_path_factory.mktemp("fault") / "fault"
    fault.write_text("")
    build = instance.build_arguments

    def build_faulty(settings: Settings, cpu: bool) -> dict[str, Any]:
        return build(settings, cpu) | {"worker_extension_cls": _EXTENSION}

    models = {"a": make_model(0), "b": make_model(1), "c": make_model(2)}
    chosen = EngineSettings(**{"max_model_len": 256, "max_num_seqs": 16, "hang_timeout_s": 300.0} | sizes)
    weights = WeightSettings(cache_dir=tmp_path_factory.mktemp("cache"), update=update)
    rollout = RolloutSettings(engine=chosen, weights=weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instance, "build_arguments", build_faulty)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv(_VARIABLE, str(fault))
        engine = VllmEngine(Settings(model=ModelSettings(path=models["a"]), rollout=rollout, security=ANYWHERE_HERE))
        one = CanaryEngine(engine, models, fault)
        one.canaries |= {name: score(folder) for name, folder in models.items()}
        yield one
        engine.shutdown()
