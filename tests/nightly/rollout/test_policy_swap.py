"""New weights in a running engine are, to the bit, those of an engine that is started with them; and what may fail."""

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
import torch
from policy_places import ANYWHERE_HERE
from safetensors.torch import load_file, save_file
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile, PolicyPart
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Generation, GenerationRequest
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_runtime.settings.rollout import WeightSettings
from forage_runtime.telemetry.waits import list_waits
from forage_weights.announcement import PolicyError
from forage_weights.delta import encode_delta
from forage_weights.digests import compute_content, compute_digest
from forage_weights.tensors import open_tensors

WEIGHTS = "model.safetensors"
VERSIONS = itertools.count(1)


@asynccontextmanager
async def start_engine(folder: Path, cache: Path) -> AsyncIterator[VllmEngine]:
    weights = WeightSettings(cache_dir=cache)
    rollout = RolloutSettings(engine=EngineSettings(max_num_seqs=16), weights=weights)
    engine = VllmEngine(Settings(model=ModelSettings(path=folder), rollout=rollout, security=ANYWHERE_HERE))
    try:
        yield engine
    finally:
        engine.shutdown()


def announce(folder: Path) -> Policy:
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    return Policy(version=next(VERSIONS), epoch=1, uri=str(folder), digest=digest)


def describe_files(folder: Path, name: str) -> list[PolicyFile]:
    file = folder / name
    return [PolicyFile(name=name, digest=compute_digest(file), bytes=file.stat().st_size)]


def announce_delta(base: Path, folder: Path, out: Path) -> Policy:
    """What leads from one folder to the other, in a folder of its own."""
    out.mkdir()
    old, new = ({name: t.bits for name, t in open_tensors(one / WEIGHTS).items()} for one in (base, folder))
    assert encode_delta(old, new, out / "delta", 2**30)
    parts = []
    for uri, of, name in ((base, base, WEIGHTS), (out, folder, "delta")):
        whole = describe_files(of, WEIGHTS)
        content = compute_content({file.name: file.digest for file in whole})
        parts.append(PolicyPart(version=next(VERSIONS), epoch=1, uri=str(uri), files=describe_files(uri, name)))
        parts[-1].content = content
    return Policy(version=parts[-1].version, epoch=1, uri=str(out), files=describe_files(folder, WEIGHTS), parts=parts)


def make_next(folder: Path, out: Path) -> Path:
    """A model in which about one element in a hundred has the next representable value."""
    shutil.copytree(folder, out)
    torch.manual_seed(0)
    changed = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        bits = weight.view(torch.int32)
        changed[name] = (bits + (torch.rand(bits.shape) < 0.01).to(bits.dtype)).view(weight.dtype)
    save_file(changed, out / WEIGHTS, {"format": "pt"})
    return out


async def sample(engine: VllmEngine) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of the same requests, one after the other: sums depend on the size of a batch."""
    source, sampled = random.Random(3), []
    for seed, length in enumerate((40, 70, 33, 64)):
        context = [source.randrange(20, 250) for _ in range(length)]
        generation = await engine.generate(GenerationRequest(context, 40, 1.0, 1.0, -1, seed))
        sampled.append((generation.token_ids, generation.logprobs))
    return sampled


async def keep_sampling(engine: VllmEngine, loading: asyncio.Task[float], seed: int) -> list[Generation]:
    """Sample before, during and after a load."""
    generations: list[Generation] = []
    while not generations or not loading.done():
        generations.append(await engine.generate(GenerationRequest([30 + seed] * 50, 60, 1.0, 1.0, -1, seed)))
    await loading
    return [*generations, await engine.generate(GenerationRequest([30 + seed] * 50, 60, 1.0, 1.0, -1, seed))]


async def test_after_an_update_an_engine_samples_as_one_that_is_started_with_these_weights(
    make_model: Callable[[int], Path], tmp_path: Path
) -> None:
    models = {"a": make_model(0), "b": make_model(1)}
    models["c"] = make_next(models["b"], tmp_path / "c")
    updated = {}
    async with start_engine(models["a"], tmp_path / "cache") as engine:
        updated["a"] = await sample(engine)
        loads = {"b": announce(models["b"]), "c": announce_delta(models["b"], models["c"], tmp_path / "delta")}
        for name, policy in loads.items():
            loading = asyncio.create_task(engine.load_policy(policy))
            generations = await asyncio.gather(*[keep_sampling(engine, loading, seed) for seed in range(6)])
            for generation in itertools.chain(*generations):
                assert [span[2] for span in generation.versions] == [0, *(span[3] for span in generation.versions[:-1])]
            assert all(last.versions[-1][0] == policy.version for *_, last in generations)
            updated[name] = await sample(engine)
    assert updated["a"] != updated["b"] != updated["c"]
    for name in ("b", "c"):
        async with start_engine(models[name], tmp_path / "cache") as fresh:
            assert await sample(fresh) == updated[name]


async def until_staging() -> None:
    async with asyncio.timeout(WAIT_S):
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


@pytest.mark.parametrize("moment", ["staging", "swap"])
async def test_a_worker_that_dies_fails_the_load_and_the_engine(
    make_model: Callable[[int], Path], tmp_path: Path, moment: str
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    a, b = make_model(0), make_model(1)
    async with start_engine(a, tmp_path / "cache") as engine:
        (process,) = engine.llm.engine_core.resources.engine_manager.processes
        policy = announce(b)
        loading = asyncio.create_task(engine.load_policy(policy))
        if moment == "staging":
            await until_staging()
        else:
            async with asyncio.timeout(WAIT_S):
                while not engine._instance.pause.is_updating:
                    await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await loading
        assert engine.has_died
        assert bool(engine.out_of_service) == (moment == "swap")
        assert engine.serving is None
