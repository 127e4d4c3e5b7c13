"""No token is stale: the policy that a token's segment names is, to the bit, the one that sampled it.

A trainer's publisher announces policies that differ much, whole and as deltas. Engines follow it under load, with
prefix caching, and die. Every token's log-probability is computed again by a plain forward pass under the policy named.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from exact_parts import LIMITS, TOLERANCE, Name, Recorder, ReferenceModels, build_agent, build_prompt
from exact_parts import compare_trajectory as compare
from policy_places import ANYWHERE_HERE

from forage_proto.v1.trajectory_pb2 import Policy, Status, Trajectory
from forage_queue.streams.client import StreamClient
from forage_rollout.agent import Agent
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.vllm_start.fork_server import prepare_fork
from forage_rollout.vllm_start.vllm_args import build_environment
from forage_runtime.settings import EngineSettings, ModelSettings, RedisSettings, RolloutSettings, Settings
from forage_runtime.settings.rollout import WeightSettings
from forage_weights.cache import PolicyCache
from forage_weights.rollout.follower import Follower
from forage_weights.rollout.policy import NotServingError

RUN, FEW, ALL = "stale", 0.02, 1
TEMPERATURES = (1.0, 0.7, 1.3)
CLEARLY = 20 * TOLERANCE
LONG_S = 300.0
"""For what takes a second on a machine that is not busy."""


@dataclass
class Trainer:
    """The publisher of a trainer in its own environment, and what it has published."""

    process: subprocess.Popen[str]
    streams: StreamClient
    cache: PolicyCache
    references: ReferenceModels = field(default_factory=ReferenceModels)

    async def publish(self, share: float, epoch: int = 1) -> Policy:
        """Publish another policy; its digests are those of the weights that the references compute with."""
        return await asyncio.to_thread(self._publish, share, epoch)

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def _publish(self, share: float, epoch: int) -> Policy:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"share": share, "epoch": epoch}) + "\n")
        self.process.stdin.flush()
        answer = self.read()
        policy = self.streams.read_policy()
        assert policy is not None
        assert (policy.version, policy.epoch) == (answer["version"], answer["epoch"])
        assert bool(answer["deltas"]) == (share == FEW and policy.version > 0)
        self.references.folders[policy.version, policy.epoch] = folder = Path(answer["folder"])
        assert_same_weights(self.cache, policy, folder)
        return policy


def assert_same_weights(cache: PolicyCache, policy: Policy, folder: Path) -> None:
    """That the files with the announced digests hold the weights of a folder."""
    from safetensors.torch import load_file

    expected, held = load_file(folder / "model.safetensors"), {}
    with cache.hold(policy) as verified:
        for file in verified.files:
            if file.suffix == ".safetensors":
                held |= load_file(file)
        assert held.keys() == expected.keys()
        assert all(held[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in expected.items())


@dataclass
class Member:
    """An engine that follows the trainer's announcements, as a replica does."""

    engine: VllmEngine
    follower: Follower
    agent: Agent
    recorder: Recorder
    following: asyncio.Task[None] | None = None

    async def join(self) -> None:
        await self.follower.catch_up()
        self.following = asyncio.create_task(self.follower.follow())

    @property
    def core(self) -> int:
        (process,) = self.engine.llm.engine_core.resources.engine_manager.processes
        assert process.pid is not None
        return int(process.pid)


@pytest.fixture
def trainer(repository: Path, tmp_path: Path, redis_server: RedisSettings) -> Iterable[Trainer]:
    python, script = repository / ".venvs/trainer/bin/python", repository / "tests/support/publishing_trainer.py"
    command = [str(python if python.exists() else sys.executable), str(script)]
    command += [redis_server.url, RUN, str(repository / "models/tiny-policy"), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        streams, cache = StreamClient(redis_server, RUN, 2.0), PolicyCache(tmp_path / "checked")
        trainer = Trainer(process, streams, cache)
        trainer.read()
        yield trainer
        assert process.stdin is not None
        process.stdin.close()


@pytest_asyncio.fixture
async def start(
    repository: Path, tmp_path: Path, redis_server: RedisSettings
) -> AsyncIterator[Callable[[str], Member]]:
    model, members = repository / "models/tiny-policy", []
    rollout = RolloutSettings(
        engine=EngineSettings(max_model_len=768, max_num_seqs=32), weights=WeightSettings(cache_dir=tmp_path / "cache")
    )
    os.environ.update(build_environment(rollout.engine))
    prepare_fork()

    def start_one(name: str) -> Member:
        engine = VllmEngine(Settings(model=ModelSettings(path=model), rollout=rollout, security=ANYWHERE_HERE))
        follower = Follower(StreamClient(redis_server, RUN, 2.0), engine, name)
        members.append(Member(engine, follower, *build_agent(engine, model)))
        return members[-1]

    yield start_one
    for member in members:
        if member.following is not None:
            member.following.cancel()
            await asyncio.wait([member.following])
        member.engine.shutdown()


class Load:
    """Groups of all temperatures, several at a time, until it ends. Of an engine that dies they run again elsewhere."""

    def __init__(self, members: list[Member], groups: int) -> None:
        self.members = members
        self.trajectories: list[Trajectory] = []
        self.lost = 0
        self._numbers = itertools.count()
        self._is_ending = False
        self._running = [asyncio.create_task(self._run()) for _ in range(groups)]

    async def _run(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        while not self._is_ending:
            number = next(self._numbers)
            prompt = build_prompt(number, 4, temperature=TEMPERATURES[number % len(TEMPERATURES)])
            while True:
                living = [member for member in self.members if not member.engine.has_died]
                try:
                    group = await living[number % len(living)].agent.run_group(prompt)
                    break
                except* (EngineDeadError, NotServingError):
                    self.lost += 1
            self.trajectories += group.trajectories

    async def end(self) -> None:
        self._is_ending = True
        await asyncio.gather(*self._running)
        assert {trajectory.status for trajectory in self.trajectories} == {Status.STATUS_OK}


async def until(is_true: Callable[[], bool], load: Load | None = None) -> None:
    async with asyncio.timeout(LONG_S):
        while not is_true():
            assert load is None or not any(task.done() for task in load._running)
            await asyncio.sleep(0.001)


async def until_served(policy: Policy, member: Member, load: Load) -> None:
    """Return once an engine has sampled a few whole generations under a policy."""

    def is_served() -> bool:
        begun = [g for _, g in member.recorder.generations if g.versions[0][:2] == (policy.version, policy.epoch)]
        return member.engine.serving == policy and len(begun) >= 3

    await until(is_served, load)


def check(load: Load, references: ReferenceModels, record_property: Any) -> set[Name]:
    """Each log-probability agrees with the policy that is named, and for each policy others would clearly not."""
    context = LIMITS["max_prompt_length"]
    own = [found for t in load.trajectories for found in compare(t, references, context)]
    other = [found for t in load.trajectories for found in compare(t, references.shift(), context)]
    largest: dict[Name, float] = {}
    for name, difference in other:
        largest[name] = max(largest.get(name, 0.0), difference)
    noticed = sum(difference > CLEARLY for _, difference in other) / len(other)
    record_property("tokens", len(own))
    record_property("max_difference", max(difference for _, difference in own))
    record_property("share_noticed", round(noticed, 3))
    assert max(difference for _, difference in own) < TOLERANCE
    assert noticed > 0.25
    assert min(largest.values()) > 0.5
    return set(largest)


async def test_each_token_is_of_the_policy_that_its_segment_names(
    trainer: Trainer, start: Callable[[str], Member], record_property: Any
) -> None:
    policies = [await trainer.publish(ALL)]
    member = start("one")
    await member.join()
    load = Load([member], groups=6)
    await until_served(policies[0], member, load)
    # A second trainer, of epoch 2, publishes other weights under the same versions.
    for share, epoch in ((FEW, 1), (FEW, 1), (ALL, 1), (FEW, 1), (ALL, 2), (FEW, 2), (FEW, 2), (ALL, 2)):
        policies.append(await trainer.publish(share, epoch))
        await until_served(policies[-1], member, load)
    await load.end()
    assert check(load, trainer.references, record_property) == {(one.version, one.epoch) for one in policies}
    split = [t for t in load.trajectories if len({(one.version, one.epoch) for one in t.segments}) > 1]
    assert len(split) > len(policies)
    counts = member.engine.counts
    assert counts.cached_prompt_tokens > counts.prompt_tokens / 4
    assert counts.policy_failures == 0


async def test_after_deaths_in_mid_update_each_token_is_of_the_policy_that_its_segment_names(
    trainer: Trainer, start: Callable[[str], Member], monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    before = await trainer.publish(ALL)
    one, two, three = (start(name) for name in ("one", "two", "three"))
    await asyncio.gather(one.join(), two.join())
    load = Load([one, two], groups=6)
    await asyncio.gather(*(until_served(before, member, load) for member in (one, two)))

    # One dies when it has the new weights and does not know their name yet.
    set_label = one.engine.llm.update_weight_version

    async def die(label: str) -> None:
        os.kill(one.core, signal.SIGKILL)
        await set_label(label)

    monkeypatch.setattr(one.engine.llm, "update_weight_version", die)
    policy = await trainer.publish(FEW)
    assert one.following is not None
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(one.following, LONG_S)
    assert raised.value.subgroup(EngineDeadError)
    assert one.engine.has_died
    assert "was partially loaded" in one.engine.out_of_service
    assert one.engine.serving == before
    # Another takes its place, under the announced policy from its first token on.
    await three.join()
    load.members.append(three)
    await asyncio.gather(*(until_served(policy, member, load) for member in (two, three)))
    assert {g.versions[0][:2] for _, g in three.recorder.generations} == {(policy.version, policy.epoch)}

    # Two dies while it makes the next policy ready, in the middle of its generations.
    call = two.engine.llm.collective_rpc

    async def die_at_poll(method: str, *given: Any, **named: Any) -> Any:
        if method == "poll_policy":
            os.kill(two.core, signal.SIGKILL)
        return await call(method, *given, **named)

    monkeypatch.setattr(two.engine.llm, "collective_rpc", die_at_poll)
    policies = [before, policy, await trainer.publish(FEW)]
    await until_served(policies[-1], three, load)
    await load.end()
    assert two.engine.has_died
    assert load.lost > 0
    assert check(load, trainer.references, record_property) == {(one.version, one.epoch) for one in policies}
    # What the dead have answered, also for groups that were lost, was named rightly, too.
    for member in (one, two):
        found = [d for each in member.recorder.generations for _, d in trainer.references.compare(*each)]
        assert max(found) < TOLERANCE
