"""Whole trajectories through the real engine, agent and loop: every token, mask, turn and logprob is checked.

What was sampled is judged by plain Hugging Face forward passes under the policy that each segment names.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from exact_parts import (
    LIMITS,
    TOLERANCE,
    Recorder,
    ReferenceModels,
    build_agent,
    build_prompt,
    check_trajectory,
    find_turns,
)
from policy_places import ANYWHERE_HERE

from forage_proto.v1.trajectory_pb2 import ActionKind, Policy, Prompt, Role, Status, Trajectory
from forage_rollout.agent import Agent
from forage_rollout.engine.leases import Leases
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Generation
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_weights.announcement import PolicyError

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
VERSIONS = itertools.count(1)


@dataclass
class Parts:
    engine: VllmEngine
    folders: dict[str, Path]
    references: ReferenceModels

    def publication(self, name: str) -> Policy:
        folder = self.folders[name]
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        policy = Policy(version=next(VERSIONS), epoch=1, uri=str(folder), digest=digest)
        self.references.folders[policy.version, policy.epoch] = folder
        return policy

    async def serve(self, name: str) -> tuple[Policy, float]:
        policy = self.publication(name)
        return policy, await self.engine.load_policy(policy)

    def agent(self, **limits: Any) -> tuple[Agent, Recorder]:
        return build_agent(self.engine, self.folders["a"], **limits)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    """The shipped policy as `a`, and as `b` another that still searches."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    folders = {"a": repository / "models/tiny-policy", "b": tmp_path_factory.mktemp("models") / "b"}
    shutil.copytree(folders["a"], folders["b"])
    torch.manual_seed(0)
    weights = load_file(folders["a"] / "model.safetensors")
    changed = {name: w.float() * (1 + 0.03 * torch.randn_like(w.float())) for name, w in weights.items()}
    save_file({name: w.to(weights[name].dtype) for name, w in changed.items()}, folders["b"] / "model.safetensors")
    sizes = EngineSettings(max_model_len=768, max_num_seqs=64)
    rollout = RolloutSettings(engine=sizes)
    engine = VllmEngine(Settings(model=ModelSettings(path=folders["a"]), rollout=rollout, security=ANYWHERE_HERE))
    yield Parts(engine, folders, ReferenceModels())
    engine.shutdown()


def find_generations(trajectory: Trajectory, recorder: Recorder, max_context: int) -> list[Generation]:
    """Find the generation of each turn: the request had exactly its context, the result begins with its tokens."""
    ids, start = list(trajectory.token_ids), trajectory.prompt_length
    generations = []
    for begin, end in find_turns(trajectory):
        context, sampled = ids[: start + begin][-max_context:], ids[start + begin : start + end]
        logprobs = list(trajectory.logprobs[begin:end])
        matching = [
            generation
            for request, generation in recorder.generations
            if request.token_ids == context
            and generation.token_ids[: len(sampled)] == sampled
            and generation.logprobs[: len(sampled)] == pytest.approx(logprobs, abs=1e-6)  # stored as float32
        ]
        assert matching
        generations.append(matching[0])
    return generations


async def run(agent: Agent, prompts: Sequence[Prompt]) -> list[Trajectory]:
    groups = await asyncio.gather(*[agent.run_group(p) for p in prompts])
    trajectories = [t for group in groups for t in group.trajectories]
    assert len(trajectories) == sum(p.samples for p in prompts)
    assert {t.status for t in trajectories} == {Status.STATUS_OK}
    return trajectories


@pytest.mark.parametrize(
    ("limits", "seen"),
    [
        ({}, "observations"),
        ({"max_response_length": 9}, "responses cut"),
        ({"max_obs_length": 24}, "observations cut"),
        ({"max_prompt_length": 72}, "contexts cut"),
    ],
    ids=["whole", "responses", "observations", "contexts"],
)
async def test_every_token_has_its_mask_turn_version_and_logprob(
    parts: Parts, limits: dict[str, int], seen: str, record_property: Any
) -> None:
    policy, _ = await parts.serve("a")
    agent, recorder = parts.agent(**limits)
    trajectories = await run(agent, [build_prompt(number) for number in range(4)])
    context = limits.get("max_prompt_length", LIMITS["max_prompt_length"])
    for trajectory in trajectories:
        assert {segment.version for segment in trajectory.segments} == {policy.version}
        hit_length = any(generation.hit_length for generation in find_generations(trajectory, recorder, context))
        assert trajectory.truncated if hit_length else seen != "observations" or not trajectory.truncated
    largest = max(check_trajectory(trajectory, parts.references, context) for trajectory in trajectories)
    record_property("max_difference", largest)
    assert largest < TOLERANCE
    assert max(len(trajectory.turns) for trajectory in trajectories) >= 2
    observations = [s for t in trajectories for s in t.spans if s.role == Role.ROLE_ENV]
    assert {
        "observations": any(s.text.count("Doc ") == 2 for s in observations),
        "responses cut": any(g.hit_length for _, g in recorder.generations),
        "observations cut": any(s.end - s.begin == 24 and s.text.endswith("</information>\n\n") for s in observations),
        "contexts cut": any(len(r.token_ids) == 72 for r, _ in recorder.generations),
    }[seen]
    assert any(t.truncated for t in trajectories) or seen == "observations"


async def test_a_seed_repeats_whole_trajectories(parts: Parts) -> None:
    policy, _ = await parts.serve("a")
    agent, _ = parts.agent()
    first, again = [await run(agent, [build_prompt(number) for number in numbers]) for numbers in ((0, 1), (1, 0, 2))]
    other = await run(agent, [build_prompt(0, seed=8000)])
    by_id = {t.id: t for t in again}
    for trajectory in first:
        twin = by_id[trajectory.id]
        assert list(trajectory.token_ids) == list(twin.token_ids)
        assert trajectory.turns == twin.turns
        assert list(trajectory.segments) == list(twin.segments)
        assert {segment.version for segment in twin.segments} == {policy.version}
    assert [list(t.token_ids) for t in other] != [list(t.token_ids) for t in first[: len(other)]]


async def test_updates_in_flight_split_trajectories_and_lose_none(parts: Parts, record_property: Any) -> None:
    await parts.serve("a")
    agent, recorder = parts.agent()
    running = asyncio.create_task(run(agent, [build_prompt(number, samples=8) for number in range(8)]))
    pauses = []
    for enough, name in ((40, "b"), (90, "a")):
        while len(recorder.generations) < enough and not running.done():
            await asyncio.sleep(0.005)
        pauses.append((await parts.serve(name))[1])
    trajectories = await running
    split = [t for t in trajectories if len({segment.version for segment in t.segments}) > 1]
    assert len(split) > 5
    largest = max(
        check_trajectory(trajectory, parts.references, LIMITS["max_prompt_length"]) for trajectory in trajectories
    )
    record_property("max_difference", largest)
    assert largest < TOLERANCE
    record_property("update_pause_s", pauses)


async def test_no_token_is_stale_at_learning_rate_0(parts: Parts, record_property: Any) -> None:
    """The same weights under many versions, as `test_stale_tokens` has them for policies that differ."""
    await parts.serve("a")
    cached = parts.engine.counts.cached_prompt_tokens
    agent, recorder = parts.agent()
    running = asyncio.create_task(run(agent, [build_prompt(number, samples=4) for number in range(8)]))
    for number in range(8):
        while len(recorder.generations) < 7 * (number + 1) and not running.done():
            await asyncio.sleep(0.005)
        await parts.serve("a")
    trajectories = await running
    assert parts.engine.counts.cached_prompt_tokens > cached
    assert len({segment.version for t in trajectories for segment in t.segments}) >= 4
    context = LIMITS["max_prompt_length"]
    largest = max(check_trajectory(trajectory, parts.references, context) for trajectory in trajectories)
    record_property("max_difference", largest)
    assert largest < TOLERANCE


async def test_a_drained_update_splits_no_trajectory_and_loses_none(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(60.0)
    for one in (parts.engine, parts.engine._loader):  # as with rollout.weights.update = drain
        monkeypatch.setattr(one, "_leases", leases)
    await parts.serve("a")
    agent, recorder = parts.agent()
    some = asyncio.Semaphore(4)

    async def run_group(number: int) -> list[Trajectory]:
        async with some:
            return await run(agent, [build_prompt(number, samples=4)])

    running = [asyncio.create_task(run_group(number)) for number in range(16)]
    for enough, name in ((20, "b"), (60, "a")):
        while len(recorder.generations) < enough:
            await asyncio.sleep(0.005)
        await parts.serve(name)
    trajectories = [t for groups in await asyncio.gather(*running) for t in groups]
    versions = [{segment.version for segment in t.segments} for t in trajectories]
    assert {len(one) for one in versions} == {1}
    assert len(set.union(*versions)) == 3
    assert max(check_trajectory(t, parts.references, LIMITS["max_prompt_length"]) for t in trajectories) < TOLERANCE


async def test_a_damaged_or_older_policy_is_refused_and_nothing_changes(parts: Parts, tmp_path: Path) -> None:
    old = parts.publication("b")
    served, _ = await parts.serve("a")
    agent, _ = parts.agent()
    before = await run(agent, [build_prompt(0)])
    with pytest.raises(PolicyError, match="is not newer than"):
        await parts.engine.load_policy(old)
    content = (parts.folders["b"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    torn = Policy(version=next(VERSIONS), epoch=1, uri=str(tmp_path), digest=hashlib.sha256(content).hexdigest())
    with pytest.raises(PolicyError, match="does not have the digest"):
        await parts.engine.load_policy(torn)
    torn.digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    with pytest.raises(PolicyError, match="its header describes"):
        await parts.engine.load_policy(torn)
    assert parts.engine.serving == served
    after = await run(agent, [build_prompt(0)])
    assert [list(t.token_ids) for t in after] == [list(t.token_ids) for t in before]


async def test_a_search_adds_an_observation_and_an_answer_ends_the_trajectory(parts: Parts) -> None:
    await parts.serve("a")
    agent, _ = parts.agent()
    trajectories = await run(agent, [build_prompt(number) for number in range(4)])
    for trajectory in trajectories:
        kinds = [turn.action for turn in trajectory.turns]
        assert trajectory.finished == (kinds[-1] == ActionKind.ACTION_KIND_ANSWER)
        assert ActionKind.ACTION_KIND_ANSWER not in kinds[:-1]
        assert sum(turn.executed for turn in trajectory.turns) == sum(
            span.role == Role.ROLE_ENV and "<information>" in span.text for span in trajectory.spans
        )
    assert dataclasses.asdict(agent.counts)["searches"] > 0
