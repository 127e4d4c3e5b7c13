"""The real vLLM engine on a tiny random model: its log-probabilities are those of Hugging Face, always.

One engine serves the whole module; every test loads the policy it needs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from policy_places import ANYWHERE_HERE
from waiting import wait_until_async

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile, PolicyPart
from forage_queue.rollout.concurrency import EngineLoad, GroupLimit
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Generation, GenerationRequest
from forage_rollout.metrics import to_counts
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_runtime.settings.rollout import WeightSettings
from forage_runtime.telemetry.stacks import FOLDER_VARIABLE, SIGNAL, find_stack_file
from forage_runtime.telemetry.waits import list_waits
from forage_weights.announcement import PolicyError
from forage_weights.delta import encode_delta
from forage_weights.digests import compute_content, compute_digest
from forage_weights.rollout.policy import NotServingError
from forage_weights.tensors import open_tensors

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
VERSIONS = itertools.count(1)
TOLERANCE = 1e-3
SLOTS = 64
BLOCKS = 1777
"""Of the KV cache; vLLM alone would make another number of them."""


@dataclass
class Parts:
    engine: VllmEngine
    models: dict[str, Path]
    stacks: Path

    async def serve(self, name: str) -> Policy:
        policy = describe_policy(self.models[name])
        await self.engine.load_policy(policy)
        return policy


def describe_policy(folder: Path) -> Policy:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return Policy(version=next(VERSIONS), epoch=1, uri=str(folder), digest=digest)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(make_model: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    stacks = tmp_path_factory.mktemp("stacks")
    os.environ[FOLDER_VARIABLE] = str(stacks)
    models = {"a": make_model(0), "b": make_model(1)}
    given = {"num_gpu_blocks_override": BLOCKS, "scheduling_policy": "priority"}
    limits = {"max_model_len": 768, "max_num_seqs": SLOTS, "hang_timeout_s": 300.0}
    sizes = EngineSettings(**limits, args=given)
    weights = WeightSettings(cache_dir=tmp_path_factory.mktemp("cache"))
    rollout = RolloutSettings(engine=sizes, weights=weights)
    settings = Settings(model=ModelSettings(path=models["a"]), rollout=rollout, security=ANYWHERE_HERE)
    engine = VllmEngine(settings)
    yield Parts(engine, models, stacks)
    engine.shutdown()
    del os.environ[FOLDER_VARIABLE]


@cache
def load_reference(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def compute_reference(folder: Path, context: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of the sampled tokens by a plain forward pass."""
    import torch

    with torch.no_grad():
        logits = load_reference(folder)(torch.tensor([context + sampled])).logits[0, len(context) - 1 : -1]
    rows = torch.log_softmax(logits / temperature, -1)
    return [float(value) for value in rows.gather(1, torch.tensor(sampled)[:, None])[:, 0]]


def find_largest_difference(actual: list[float], expected: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(actual, expected, strict=True))


def count_running_tokens(engine: VllmEngine) -> int:
    """Tokens that were sampled for requests in flight."""
    return sum(state.detokenizer.num_output_tokens() for state in engine.llm.output_processor.request_states.values())


def draw_contexts(count: int, length: int) -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(20, 250) for _ in range(length + 9 * i)] for i in range(count)]


def ask(context: list[int], seed: int | None = 1, tokens: int = 40, temperature: float = 1.0) -> GenerationRequest:
    return GenerationRequest(context, tokens, temperature, 1.0, -1, seed)


async def check_serves(parts: Parts, name: str) -> None:
    """Check that log-probabilities are those of a model."""
    context = draw_contexts(1, 50)[0]
    generation = await parts.engine.generate(ask(context))
    expected = compute_reference(parts.models[name], context, generation.token_ids)
    assert find_largest_difference(generation.logprobs, expected) < TOLERANCE


async def test_arguments_of_the_users_own_reach_vllms_core(parts: Parts) -> None:
    """The core counts its blocks, and tells this process."""
    assert parts.engine.llm.vllm_config.cache_config.num_gpu_blocks == BLOCKS


async def test_logprobs_are_those_of_the_model_in_the_type_that_the_engine_declares(parts: Parts) -> None:
    assert parts.engine.dtype == "float32"
    policy = await parts.serve("a")
    asked = draw_contexts(8, 50)
    done = await asyncio.gather(*[parts.engine.generate(ask(c, seed)) for seed, c in enumerate(asked)])
    for context, generation in zip(asked, done, strict=True):
        assert len(generation.token_ids) == len(generation.logprobs)
        expected = compute_reference(parts.models["a"], context, generation.token_ids)
        assert find_largest_difference(generation.logprobs, expected) < TOLERANCE
        assert generation.versions == [(policy.version, 1, 0, len(generation.token_ids))]


async def test_logprobs_follow_an_update_the_tied_head_included(parts: Parts) -> None:
    context = draw_contexts(1, 60)[0]
    sampled: dict[str, Generation] = {}
    for name in ("a", "b", "a"):
        await parts.serve(name)
        generation = await parts.engine.generate(ask(context))
        other = parts.models["b" if name == "a" else "a"]
        assert (
            find_largest_difference(
                generation.logprobs, compute_reference(parts.models[name], context, generation.token_ids)
            )
            < TOLERANCE
        )
        assert (
            find_largest_difference(generation.logprobs, compute_reference(other, context, generation.token_ids)) > 0.1
        )
        assert sampled.setdefault(name, generation).token_ids == generation.token_ids


async def test_logprobs_follow_deltas_from_a_policy_in_the_cache_and_from_the_one_that_is_served(
    parts: Parts, tmp_path: Path
) -> None:
    file = "model.safetensors"
    whole, target = (describe_policy(parts.models[name]) for name in ("a", "b"))
    contents = [compute_content({file: policy.digest}) for policy in (whole, target)]
    listed = PolicyFile(name=file, digest=whole.digest, bytes=(parts.models["a"] / file).stat().st_size)
    steps = [PolicyPart(uri=whole.uri, files=[listed], content=contents[0])]
    for old, new in (("a", "b"), ("b", "a")):
        folder, content = tmp_path / new, contents["ab".index(new)]
        folder.mkdir()
        bits = [
            {name: tensor.bits for name, tensor in open_tensors(parts.models[model] / file).items()}
            for model in (old, new)
        ]
        assert encode_delta(*bits, folder / "delta", 2**30, steps[-1].content, content)
        delta = PolicyFile(name="delta", digest=compute_digest(folder / "delta"))
        steps.append(PolicyPart(uri=str(folder), files=[delta], content=content))
        announced = describe_policy(parts.models[new])
        announced.uri = str(folder)
        announced.parts.extend(steps)
        await parts.engine.load_policy(announced)
        await check_serves(parts, new)


async def test_cached_prefixes_of_the_old_policy_are_not_used(parts: Parts) -> None:
    context = draw_contexts(1, 300)[0]
    await parts.serve("a")
    await parts.engine.generate(ask(context))
    before = parts.engine.counts.cached_prompt_tokens
    await parts.engine.generate(ask(context))
    assert parts.engine.counts.cached_prompt_tokens - before >= 256  # the cache works at all
    await parts.serve("b")
    before = parts.engine.counts.cached_prompt_tokens
    generation = await parts.engine.generate(ask(context))
    assert parts.engine.counts.cached_prompt_tokens == before
    assert (
        find_largest_difference(
            generation.logprobs, compute_reference(parts.models["b"], context, generation.token_ids)
        )
        < TOLERANCE
    )


async def test_a_generation_during_an_update_records_the_version_of_each_token(parts: Parts) -> None:
    old = await parts.serve("a")
    asked = draw_contexts(16, 40)
    running = [asyncio.create_task(parts.engine.generate(ask(c, None, 500))) for c in asked]
    await wait_until_async(lambda: count_running_tokens(parts.engine) > 20 * len(asked))
    new = await parts.serve("b")
    done = await asyncio.gather(*running)
    switched = 0
    for context, generation in zip(asked, done, strict=True):
        spans = generation.versions
        assert [span[2] for span in spans] == [0, *(span[3] for span in spans[:-1])]
        assert spans[-1][3] == len(generation.token_ids)
        assert {span[0] for span in spans} <= {old.version, new.version}
        for version, _, begin, end in spans:
            folder = parts.models["a" if version == old.version else "b"]
            expected = compute_reference(folder, context, generation.token_ids)
            assert find_largest_difference(generation.logprobs[begin:end], expected[begin:end]) < TOLERANCE
        switched += len(spans) == 2
    assert switched > 0


async def test_updates_and_sleeps_under_load_evict_nothing_and_leave_the_limit_of_groups_alone(parts: Parts) -> None:
    """They clear the cache, which vLLM counts as a preemption of all that runs."""
    engine, limit, asked, ended = parts.engine, GroupLimit(64, 4, SLOTS), draw_contexts(6, 40), 0

    async def stay_busy(context: list[int]) -> None:
        nonlocal ended
        while limit.reason != "ceiling":
            await engine.generate(ask(context, None, 120))
            ended += 1

    async def run_on() -> None:
        """Return once whatever runs now has ended: what vLLM says of a request comes with its tokens."""
        enough = ended + 2 * len(asked)
        await wait_until_async(lambda: ended >= enough)
        limit.look({"one": EngineLoad.from_counts(to_counts(engine.counts))}, limit.groups, is_full=True)

    await parts.serve("a")
    evicted = engine.counts.evictions
    running = asyncio.gather(*map(stay_busy, asked))
    await run_on()
    for name in ("b", "a"):
        await parts.serve(name)
        await run_on()
    await engine.fall_asleep()
    await engine.wake_up()
    await run_on()
    assert engine.counts.evictions == evicted
    assert (limit.groups, limit.lowered) == (64, 0)
    await run_on()
    await running


async def test_a_seed_repeats_a_generation_whatever_else_runs(parts: Parts) -> None:
    await parts.serve("a")
    asked = draw_contexts(32, 150)  # more prompt tokens than one engine step takes
    together = await asyncio.gather(*[parts.engine.generate(ask(c, seed)) for seed, c in enumerate(asked)])
    alone = [await parts.engine.generate(ask(c, seed)) for seed, c in enumerate(asked[:4])]
    assert [g.token_ids for g in alone] == [g.token_ids for g in together[:4]]
    again = await parts.engine.generate(ask(asked[0], 99))
    assert again.token_ids != alone[0].token_ids


async def test_an_urgent_generation_overtakes_those_that_wait(parts: Parts) -> None:
    await parts.serve("a")
    context = draw_contexts(1, 50)[0]
    requests = [dataclasses.replace(ask(context, seed, tokens=60), priority=9) for seed in range(2 * SLOTS)]
    ended: list[int] = []

    async def generate(request: GenerationRequest) -> None:
        await parts.engine.generate(request)
        ended.append(request.priority)

    await parts.engine.pause(drain=False)
    running = [asyncio.create_task(generate(request)) for request in requests]
    await wait_until_async(lambda: parts.engine.counts.requests_waiting == len(requests))
    running.append(asyncio.create_task(generate(dataclasses.replace(ask(context, 999, tokens=10), priority=1))))
    await wait_until_async(lambda: parts.engine.counts.requests_waiting == len(running))
    await parts.engine.resume()
    await asyncio.gather(*running)
    assert ended.index(1) < SLOTS, "it was among the first that were sampled"


async def test_logprobs_are_of_the_distribution_that_was_sampled(parts: Parts) -> None:
    await parts.serve("a")
    context = draw_contexts(1, 50)[0]
    generation = await parts.engine.generate(ask(context, temperature=0.5))
    expected = compute_reference(parts.models["a"], context, generation.token_ids, temperature=0.5)
    assert find_largest_difference(generation.logprobs, expected) < TOLERANCE


async def test_greedy_takes_the_most_likely_token_with_its_logprob_at_temperature_one(parts: Parts) -> None:
    await parts.serve("a")
    context = draw_contexts(1, 50)[0]
    generation = await parts.engine.generate(ask(context, temperature=0.0))
    assert (
        find_largest_difference(
            generation.logprobs, compute_reference(parts.models["a"], context, generation.token_ids)
        )
        < TOLERANCE
    )


async def test_an_altered_policy_is_refused_and_the_engine_goes_on(parts: Parts) -> None:
    policy = await parts.serve("a")
    forged = describe_policy(parts.models["b"])
    forged.digest = "0" * 64
    with pytest.raises(PolicyError, match="digest"):
        await parts.engine.load_policy(forged)
    assert parts.engine.serving == policy
    context = draw_contexts(1, 50)[0]
    generation = await parts.engine.generate(ask(context))
    assert (
        find_largest_difference(
            generation.logprobs, compute_reference(parts.models["a"], context, generation.token_ids)
        )
        < TOLERANCE
    )


async def test_an_announced_policy_of_a_lower_epoch_is_loaded(parts: Parts) -> None:
    current = await parts.serve("a")
    lower = describe_policy(parts.models["b"])
    lower.epoch = 0
    with pytest.raises(PolicyError, match="is not newer than"):
        await parts.engine.load_policy(lower)
    assert parts.engine.serving == current
    await parts.engine.load_policy(lower, allow_older=True)
    assert parts.engine.serving == lower
    context = draw_contexts(1, 50)[0]
    generation = await parts.engine.generate(ask(context))
    assert generation.versions == [(lower.version, 0, 0, len(generation.token_ids))]
    assert (
        find_largest_difference(
            generation.logprobs, compute_reference(parts.models["b"], context, generation.token_ids)
        )
        < TOLERANCE
    )


async def test_a_chat_is_rendered_with_the_models_template(parts: Parts) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(parts.models["a"])
    ids = (await parts.engine.render_chat([{"role": "user", "content": "Who? <search>"}])).token_ids
    assert tokenizer.decode(ids) == "<|im_start|>user\nWho? <search><|im_end|>\n<|im_start|>assistant\n"
    assert parts.engine.end_of_turn == "<|im_end|>"


async def test_a_pause_holds_generation_and_does_not_change_its_tokens(parts: Parts) -> None:
    await parts.serve("a")
    context = draw_contexts(1, 50)[0]
    undisturbed = await parts.engine.generate(ask(context, tokens=300))
    running = asyncio.create_task(parts.engine.generate(ask(context, tokens=300)))
    await wait_until_async(lambda: parts.engine.counts.requests_running)
    await parts.engine.pause(drain=False)
    await parts.engine.pause(drain=False)
    late = asyncio.create_task(parts.engine.generate(ask(context, seed=2)))
    await asyncio.sleep(0.2)
    assert not running.done()
    assert not late.done()
    assert parts.engine.is_paused
    assert parts.engine.counts.paused == 1
    await parts.engine.probe()  # it stands still on purpose
    await parts.engine.resume()
    await parts.engine.resume()
    assert (await running).token_ids == undisturbed.token_ids
    assert await late
    assert not parts.engine.is_paused


async def test_a_draining_pause_lets_running_generations_end(parts: Parts) -> None:
    await parts.serve("a")
    running = [asyncio.create_task(parts.engine.generate(ask(c, tokens=80))) for c in draw_contexts(8, 50)]
    await wait_until_async(lambda: parts.engine.counts.requests_running == len(running))
    await parts.engine.pause(drain=True)
    assert parts.engine.counts.requests_running == 0
    await asyncio.gather(*running)
    late = asyncio.create_task(parts.engine.generate(ask(draw_contexts(1, 50)[0])))
    await asyncio.sleep(0.1)
    assert not late.done()
    await parts.engine.resume()
    await late


async def test_an_update_within_a_pause_leaves_the_engine_paused(parts: Parts) -> None:
    await parts.serve("a")
    await parts.engine.pause(drain=False)
    late = asyncio.create_task(parts.engine.generate(ask(draw_contexts(1, 50)[0])))
    policy = await parts.serve("b")
    await asyncio.sleep(0.1)
    assert not late.done()
    await parts.engine.resume()
    assert (await late).versions == [(policy.version, 1, 0, len((await late).token_ids))]


async def test_a_load_that_is_cancelled_before_its_pause_leaves_the_engine_as_it_was(parts: Parts) -> None:
    old = await parts.serve("a")
    updating = asyncio.create_task(parts.engine.load_policy(describe_policy(parts.models["b"])))
    while not any(wait["what"].startswith("a policy to be loaded") for wait in list_waits()):
        await asyncio.sleep(0)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert parts.engine.serving == old
    await check_serves(parts, "a")
    await parts.serve("b")
    await check_serves(parts, "b")


async def test_a_load_that_is_cancelled_within_its_pause_ends(parts: Parts) -> None:
    await parts.serve("a")
    policy = describe_policy(parts.models["b"])
    updating = asyncio.create_task(parts.engine.load_policy(policy))
    while not parts.engine._instance.pause.is_updating:
        await asyncio.sleep(0)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert parts.engine.serving == policy
    await check_serves(parts, "b")


async def test_stop_texts_and_min_tokens_are_those_of_the_request(parts: Parts) -> None:
    await parts.serve("a")
    context = draw_contexts(1, 50)[0]
    free = (await parts.engine.generate(ask(context, tokens=30))).token_ids
    tokenizer: Any = parts.engine.llm.get_tokenizer()
    text = tokenizer.decode(free)
    stop = next(
        text[i : i + 2] for i in range(8, len(text)) if text[i : i + 2].isascii() and text[i : i + 2].isprintable()
    )
    stopped = await parts.engine.generate(dataclasses.replace(ask(context, tokens=30), stop=(stop,)))
    assert len(stopped.token_ids) == len(stopped.logprobs) < 30
    assert stopped.token_ids == free[: len(stopped.token_ids)]
    assert stop in tokenizer.decode(stopped.token_ids)
    assert stop not in tokenizer.decode(stopped.token_ids[:-1])
    assert not stopped.hit_length
    long = await parts.engine.generate(dataclasses.replace(ask(context, tokens=30), stop=(stop,), min_tokens=30))
    assert len(long.token_ids) == 30


async def test_an_engine_out_of_service_refuses_requests_until_it_loads_a_policy(parts: Parts) -> None:
    await parts.serve("a")
    parts.engine.out_of_service = "the announced policy cannot be read"
    assert parts.engine.counts.out_of_service == 1
    with pytest.raises(NotServingError, match="cannot be read"):
        await parts.engine.generate(ask(draw_contexts(1, 50)[0]))
    await parts.serve("b")
    assert await parts.engine.generate(ask(draw_contexts(1, 50)[0]))


async def test_the_engines_process_shows_its_stacks_and_goes_on(parts: Parts) -> None:
    await parts.serve("a")
    (process,) = parts.engine.llm.engine_core.resources.engine_manager.processes
    file = find_stack_file(parts.stacks, process.pid)
    assert file.exists(), "else the signal would end it"
    os.kill(process.pid, SIGNAL)
    await wait_until_async(lambda: "vllm" in file.read_text())
    assert (await parts.engine.generate(ask(draw_contexts(1, 50)[0]))).token_ids


async def test_an_engine_that_sleeps_keeps_its_requests_and_wakes_under_another_policy(parts: Parts) -> None:
    """On a CPU vLLM frees nothing, but asks its worker to, and refuses no wrong order by itself."""
    engine = parts.engine
    before = await parts.serve("a")
    slept = engine.counts.sleeps
    context = draw_contexts(1, 50)[0]
    running = asyncio.create_task(engine.generate(ask(context, tokens=400)))
    await wait_until_async(lambda: engine.counts.requests_running)
    await engine.fall_asleep()
    assert (engine.is_asleep, engine.counts.asleep, await engine.llm.is_sleeping()) == (True, 1, True)
    policy = describe_policy(parts.models["b"])
    loading = asyncio.create_task(engine.load_policy(policy))
    pausing = asyncio.create_task(engine.pause(drain=False))
    waiting = asyncio.create_task(engine.generate(ask(context)))
    await engine.probe()
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in (running, waiting, loading, pausing)), "nothing is computed without memory"
    await engine.wake_weights()
    await loading
    assert (engine.serving, engine.is_asleep, waiting.done()) == (policy, True, False)
    await engine.fall_asleep()  # the trainer is back before the engine has woken
    await engine.wake_up()
    await pausing
    assert not engine.is_asleep
    await engine.resume()
    expected = compute_reference(parts.models["b"], context, (await waiting).token_ids)
    assert find_largest_difference((await waiting).logprobs, expected) < TOLERANCE
    versions = [version for version, _, _, _ in (await running).versions]
    assert versions in ([before.version, policy.version], [policy.version])
    assert (engine.counts.sleeps - slept, engine.counts.freed_bytes) == (1, 0)
    assert engine.counts.asleep_seconds > 0.2
