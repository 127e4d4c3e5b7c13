"""LoRA adapters: which are refused, and what the real engine samples under those that are not."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forage_common.files.model_folder import read_model_shapes
from forage_common.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_common.v1.trajectory_pb2 import Policy, PolicyFile
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Request
from forage_rollout.weights.adapter import CONFIG, WEIGHTS, verify_adapter
from forage_rollout.weights.policy import PolicyError, verify_files

MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
MAX_RANK = 8
VERSIONS = itertools.count(1)
TOLERANCE = 1e-3


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 4, **changes: Any) -> Policy:
    """A random adapter of a few linear layers, and its publication."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    shapes = read_model_shapes(model)
    matrices = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith(MODULES):
            matrices[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, shape[1]) * 0.2
            matrices[f"base_model.model.{module}.lora_B.weight"] = torch.randn(shape[0], rank) * 0.2
    folder.mkdir(parents=True)
    save_file(matrices, folder / WEIGHTS)
    targets = sorted({module.rpartition(".")[2] for module in MODULES})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(config | changes))
    return announce(folder)


def announce(folder: Path) -> Policy:
    files = [
        PolicyFile(name=file.name, digest=hashlib.sha256(file.read_bytes()).hexdigest(), bytes=file.stat().st_size)
        for file in sorted(folder.iterdir())
    ]
    return Policy(version=next(VERSIONS), epoch=1, uri=str(folder), adapter=True, files=files)


def merged(model: Path, adapter: Path) -> Any:
    """The model with the adapter's product added to its weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    config = json.loads((adapter / CONFIG).read_text())
    matrices = load_file(adapter / WEIGHTS)
    weights = dict(found.named_parameters())
    with torch.no_grad():
        for name, low in matrices.items():
            if name.endswith("lora_A.weight"):
                high = matrices[name.replace("lora_A", "lora_B")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weights[f"{module}.weight"] += config["lora_alpha"] / config["r"] * high @ low
    return found


def logprobs(model: Any, context: list[int], sampled: list[int]) -> list[float]:
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([context + sampled])).logits[0, len(context) - 1 : -1]
    rows = torch.log_softmax(logits, -1)
    return [float(value) for value in rows.gather(1, torch.tensor(sampled)[:, None])[:, 0]]


def verified(policy: Policy, model: Path) -> Path:
    return verify_adapter(policy, verify_files(policy, Path(policy.uri)), read_model_shapes(model), MAX_RANK)


@dataclass
class Parts:
    engine: VllmEngine
    model: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(make_model: Any) -> AsyncIterator[Parts]:
    model = make_model(0)
    sizes = EngineSettings(max_model_len=768, max_num_seqs=32, max_lora_rank=MAX_RANK)
    engine = VllmEngine(Settings(model=ModelSettings(path=model), rollout=RolloutSettings(engine=sizes)))
    yield Parts(engine, model)
    engine.shutdown()


def ask(seed: int | None, tokens: int = 60) -> Request:
    source = random.Random(7)
    return Request([source.randrange(20, 250) for _ in range(90)], tokens, 1.0, 1.0, -1, seed)


slow = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


def marked(test: Any) -> Any:
    for mark in slow:
        test = mark(test)
    return test


@marked
async def test_logprobs_are_those_of_the_merged_model(parts: Parts, tmp_path: Path) -> None:
    request = ask(1)
    bare = await parts.engine.generate(request)
    assert bare.versions == [(0, 0, 0, len(bare.token_ids))]
    for seed, rank in ((1, 4), (2, 8)):
        policy = write_adapter(tmp_path / str(seed), parts.model, seed, rank)
        assert await parts.engine.load_policy(policy) == 0.0
        for _ in range(2):  # the second time from the prefix cache, of this adapter alone
            done = await parts.engine.generate(request)
            expected = logprobs(merged(parts.model, tmp_path / str(seed)), request.token_ids, done.token_ids)
            assert max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)) < TOLERANCE
            assert done.versions == [(policy.version, 1, 0, len(done.token_ids))]
            assert done.token_ids != bare.token_ids


@marked
async def test_a_generation_ends_under_the_adapter_it_began_with_which_then_goes(parts: Parts, tmp_path: Path) -> None:
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
        expected = logprobs(
            merged(parts.model, folders[generation.versions[0][0]]), request.token_ids, generation.token_ids
        )
        assert max(abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True)) < TOLERANCE
    assert len(await parts.engine.llm.list_loras()) == 1


@marked
async def test_an_adapter_that_is_refused_changes_nothing(parts: Parts, tmp_path: Path) -> None:
    served = write_adapter(tmp_path / "good", parts.model, 5)
    await parts.engine.load_policy(served)
    torn = write_adapter(tmp_path / "torn", parts.model, 6)
    (tmp_path / "torn" / WEIGHTS).write_bytes((tmp_path / "torn" / WEIGHTS).read_bytes()[:-9])
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


@pytest.fixture(scope="module")
def model(make_model: Any) -> Path:
    folder: Path = make_model(0)
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"r": 9}, "rank 9: expected 1 to rollout.engine.max_lora_rank 8"),
        ({"r": 0}, "rank 0"),
        ({"r": 5}, r"has shape \[4, \d+\], expected \[5, \d+\]"),
        ({"r": "many"}, "no usable adapter_config.json"),
        ({"lora_alpha": 0}, "would change nothing"),
        ({"use_dora": True}, "sets use_dora"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "sets rank_pattern"),
        ({"bias": "all"}, "sets bias"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    assert verified(write_adapter(tmp_path / "good", model, 1), model) == tmp_path / "good"
    with pytest.raises(PolicyError, match=sentence):
        verified(write_adapter(tmp_path / "adapter", model, 1, **changes), model)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (
            {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": (4, 128)},
            "not a LoRA matrix of a linear layer",
        ),
        ({"base_model.model.model.embed_tokens.lora_A.weight": (4, 128)}, "not a LoRA matrix of a linear layer"),
        ({"model.layers.0.mlp.up_proj.weight": (256, 128)}, "not a LoRA matrix of a linear layer"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (4, 128)}, "only one of the two matrices"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": (4, 128)}, r"expected \[256, 4\]"),
        ({}, "holds no matrices"),
    ],
)
def test_matrices_that_do_not_fit_the_model_are_refused(
    model: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], sentence: str
) -> None:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "adapter"
    write_adapter(folder, model, 1)
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(PolicyError, match=sentence):
        verified(announce(folder), model)


def test_an_adapter_is_its_two_files(model: Path, tmp_path: Path) -> None:
    policy = write_adapter(tmp_path / "adapter", model, 1)
    del policy.files[0]
    with pytest.raises(PolicyError, match=r"expected adapter_config\.json and adapter_model\.safetensors"):
        verified(policy, model)
