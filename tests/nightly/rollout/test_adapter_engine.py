"""LoRA adapters in the real engine: tokens and log-probabilities are those of the merged model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lora_adapter import MAX_RANK, VERSIONS, announce, write_adapter
from policy_places import ANYWHERE_HERE

from forage_proto.v1.trajectory_pb2 import Policy
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import GenerationRequest
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_weights.announcement import PolicyError
from forage_weights.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from forage_weights.rollout.canary import CanaryError

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
TOLERANCE = 1e-3


def merge_adapter(model: Path, adapter: Path) -> Any:
    """Load the model and add the adapter's product to its weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model_with_adapter = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    matrices = load_file(adapter / ADAPTER_WEIGHTS)
    weights = dict(model_with_adapter.named_parameters())
    with torch.no_grad():
        for name, low in matrices.items():
            if name.endswith("lora_A.weight"):
                high = matrices[name.replace("lora_A", "lora_B")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weights[f"{module}.weight"] += config["lora_alpha"] / config["r"] * high @ low
    return model_with_adapter


def compute_logprobs(model: Any, context: list[int], sampled: list[int]) -> list[float]:
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([context + sampled])).logits[0, len(context) - 1 : -1]
    rows = torch.log_softmax(logits, -1)
    return [float(value) for value in rows.gather(1, torch.tensor(sampled)[:, None])[:, 0]]


@dataclass
class Parts:
    engine: VllmEngine
    model: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(make_model: Any) -> AsyncIterator[Parts]:
    model = make_model(0)
    sizes = EngineSettings(max_model_len=768, max_num_seqs=32, max_lora_rank=MAX_RANK)
    rollout = RolloutSettings(engine=sizes)
    engine = VllmEngine(Settings(model=ModelSettings(path=model), rollout=rollout, security=ANYWHERE_HERE))
    yield Parts(engine, model)
    engine.shutdown()


def ask(seed: int | None, tokens: int = 60) -> GenerationRequest:
    source = random.Random(7)
    return GenerationRequest([source.randrange(20, 250) for _ in range(90)], tokens, 1.0, 1.0, -1, seed)


async def test_logprobs_are_those_of_the_merged_model(parts: Parts, tmp_path: Path) -> None:
    request = ask(1)
    bare = await parts.engine.generate(request)
    assert bare.versions == [(0, 0, 0, len(bare.token_ids))]
    for seed, rank in ((1, 4), (2, 8)):
        policy = write_adapter(tmp_path / str(seed), parts.model, seed, rank)
        assert await parts.engine.load_policy(policy) == 0.0
        for _ in range(2):  # the second time from the prefix cache, of this adapter alone
            done = await parts.engine.generate(request)
            expected = compute_logprobs(
                merge_adapter(parts.model, tmp_path / str(seed)), request.token_ids, done.token_ids
            )
            assert max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)) < TOLERANCE
            assert done.versions == [(policy.version, 1, 0, len(done.token_ids))]
            assert done.token_ids != bare.token_ids


async def test_a_generation_keeps_its_adapter_to_its_end_and_the_adapter_is_removed_then(
    parts: Parts, tmp_path: Path
) -> None:
    folders, policies = {}, []
    for seed in (3, 4):
        policies.append(write_adapter(tmp_path / str(seed), parts.model, seed))
        folders[policies[-1].version] = tmp_path / str(seed)
    old, new = policies
    await parts.engine.load_policy(old)
    requests = [ask(seed, 400) for seed in range(8)]
    running = [asyncio.create_task(parts.engine.generate(request)) for request in requests]
    while parts.engine.counts.requests_running < len(requests):
        await asyncio.sleep(0.01)
    await parts.engine.load_policy(new)
    assert len(await parts.engine.llm.list_loras()) == 2
    late = await parts.engine.generate(ask(99))
    done = [*await asyncio.gather(*running), late]
    assert [g.versions[0][0] for g in done] == [old.version] * len(requests) + [new.version]
    for request, generation in zip([*requests, ask(99)], done, strict=True):
        assert len(generation.versions) == 1
        expected = compute_logprobs(
            merge_adapter(parts.model, folders[generation.versions[0][0]]), request.token_ids, generation.token_ids
        )
        assert max(abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True)) < TOLERANCE
    assert len(await parts.engine.llm.list_loras()) == 1


async def test_an_adapter_that_is_refused_changes_nothing(parts: Parts, tmp_path: Path) -> None:
    served = write_adapter(tmp_path / "good", parts.model, 5)
    await parts.engine.load_policy(served)
    torn = write_adapter(tmp_path / "torn", parts.model, 6)
    (tmp_path / "torn" / ADAPTER_WEIGHTS).write_bytes((tmp_path / "torn" / ADAPTER_WEIGHTS).read_bytes()[:-9])
    with pytest.raises(PolicyError, match=r"bytes, announced were"):
        await parts.engine.load_policy(torn)
    digest = hashlib.sha256((parts.model / "model.safetensors").read_bytes()).hexdigest()
    with pytest.raises(PolicyError, match=r"is a whole policy and rollout\.engine\.max_lora_rank is 8"):
        await parts.engine.load_policy(Policy(version=next(VERSIONS), epoch=1, uri=str(parts.model), digest=digest))
    with pytest.raises(PolicyError, match="is not newer than"):
        await parts.engine.load_policy(served)
    assert parts.engine.serving == served
    generation = await parts.engine.generate(ask(1))
    assert generation.versions == [(served.version, 1, 0, len(generation.token_ids))]


async def test_an_adapter_serves_once_it_gives_the_trainers_log_probabilities(parts: Parts, tmp_path: Path) -> None:
    source = random.Random(47)
    rows = [[source.randrange(20, 250) for _ in range(40)] for _ in range(3)]
    policies = []
    for seed in (11, 12):
        policy = write_adapter(tmp_path / str(seed), parts.model, seed)
        merged = merge_adapter(parts.model, tmp_path / str(seed))
        for row in rows:
            policy.canary.rows.add(token_ids=row, logprobs=compute_logprobs(merged, row[:1], row[1:]))
        policy.canary.dtype = "float32"
        policies.append(policy)
    right, wrong = policies
    await parts.engine.load_policy(right)
    assert parts.engine.difference is not None
    assert parts.engine.difference < TOLERANCE
    assert parts.engine.counts.fresh_loads == 0
    wrong.canary.CopyFrom(right.canary)
    with pytest.raises(CanaryError, match="compute different models"):
        await parts.engine.load_policy(wrong)
    assert parts.engine.out_of_service
    again = announce(tmp_path / "11")
    again.canary.CopyFrom(right.canary)
    await parts.engine.load_policy(again)
    assert (await parts.engine.generate(ask(1, 8))).versions == [(again.version, 1, 0, 8)]
