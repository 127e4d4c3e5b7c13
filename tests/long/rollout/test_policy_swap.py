"""What may fail while an engine makes a policy ready."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forage_common.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_common.settings.rollout import WeightSettings
from forage_common.telemetry.waits import list_waits
from forage_common.v1.trajectory_pb2 import Policy
from forage_policies.announcement import PolicyError
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Request

pytestmark = pytest.mark.timeout(600)
WEIGHTS = "model.safetensors"
VERSIONS = itertools.count(1)


@asynccontextmanager
async def start_engine(folder: Path, cache: Path, dtype: str = "float32") -> AsyncIterator[VllmEngine]:
    weights = WeightSettings(cache_dir=cache)
    rollout = RolloutSettings(engine=EngineSettings(max_num_seqs=16, dtype=dtype), weights=weights)
    engine = VllmEngine(Settings(model=ModelSettings(path=folder), rollout=rollout))
    try:
        yield engine
    finally:
        engine.shutdown()


def announce(folder: Path) -> Policy:
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    return Policy(version=next(VERSIONS), epoch=1, uri=str(folder), digest=digest)


async def sample(engine: VllmEngine) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of the same requests, one after the other: sums depend on the size of a batch."""
    source, sampled = random.Random(3), []
    for seed, length in enumerate((40, 70, 33, 64)):
        context = [source.randrange(20, 250) for _ in range(length)]
        generation = await engine.generate(Request(context, 40, 1.0, 1.0, -1, seed))
        sampled.append((generation.token_ids, generation.logprobs))
    return sampled


async def until_staging() -> None:
    async with asyncio.timeout(60):
        while not any(wait["what"].startswith("a policy to be loaded") for wait in list_waits()):
            await asyncio.sleep(0)


async def test_a_policy_that_changes_while_it_is_read_is_refused(
    make_model: Callable[[int], Path], tmp_path: Path
) -> None:
    a, b = make_model(0), Path(shutil.copytree(make_model(1), tmp_path / "b"))
    async with start_engine(a, tmp_path / "cache") as engine:
        before = await sample(engine)
        loading = asyncio.create_task(engine.load_policy(announce(b)))
        await until_staging()
        with (b / WEIGHTS).open("r+b") as stream:
            stream.seek(-4, os.SEEK_END)
            stream.write(b"\0\0\0\0")
        with pytest.raises(PolicyError, match="have changed while they were read"):
            await loading
        loading = asyncio.create_task(engine.load_policy(announce(b)))
        await until_staging()
        os.truncate(b / WEIGHTS, 5000)
        with pytest.raises(PolicyError, match=r"cannot be loaded|have changed while"):
            await loading
        assert engine.serving is None
        assert await sample(engine) == before
        assert not engine.has_died


async def test_a_worker_that_dies_while_it_loads_fails_the_load_and_the_engine(
    make_model: Callable[[int], Path], tmp_path: Path
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    a, b = make_model(0), make_model(1)
    async with start_engine(a, tmp_path / "cache") as engine:
        (process,) = engine.llm.engine_core.resources.engine_manager.processes
        loading = asyncio.create_task(engine.load_policy(announce(b)))
        await until_staging()
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            with pytest.raises(EngineDeadError):
                await loading
        assert engine.has_died
        assert engine.out_of_service == ""
        assert engine.serving is None
