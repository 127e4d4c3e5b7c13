"""A real engine that stops: it is found out, and nobody waits for it for ever. The engine is of this test alone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from policy_places import ANYWHERE_HERE
from waiting import wait_until_async

from forage_proto.v1.trajectory_pb2 import Policy
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import GenerationRequest
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_weights.rollout.policy import EngineHangsError, EngineLostError, NotServingError


async def test_a_hanging_engine_is_detected_and_its_requests_fail(
    make_model: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    folder = make_model(0)
    sizes = EngineSettings(max_model_len=768, max_num_seqs=8, hang_timeout_s=300.0)
    rollout = RolloutSettings(engine=sizes)
    engine = VllmEngine(Settings(model=ModelSettings(path=folder), rollout=rollout, security=ANYWHERE_HERE))
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    await engine.load_policy(Policy(version=1, epoch=1, uri=str(folder), digest=digest))
    await engine.probe()
    running = asyncio.create_task(engine.generate(GenerationRequest(list(range(20, 70)), 600, 1.0, 1.0, -1, 1)))
    await wait_until_async(lambda: engine.counts.requests_running)
    await engine.probe()
    assert not engine.stands_still
    for process in engine.llm.engine_core.resources.engine_manager.processes:
        os.kill(process.pid, signal.SIGSTOP)
    await wait_until_async(lambda: engine.stands_still)
    monkeypatch.setattr(engine, "_hang_timeout_s", 1.0)
    with contextlib.suppress(EngineHangsError):
        await engine.probe()  # may still see what was sampled before
    with pytest.raises(EngineHangsError, match="has sampled nothing for 1 s"):
        await engine.probe()
    assert not running.done()
    engine.kill()
    with pytest.raises(EngineLostError):
        await running
    with pytest.raises(NotServingError, match="has died"):
        await engine.generate(GenerationRequest([20, 21], 40, 1.0, 1.0, -1, 1))
    with pytest.raises(EngineDeadError):
        await engine.check_health()
