"""Sessions on the real engine with the tiny policy: tokens of the built-in loop, log-probabilities of Hugging Face."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from policy_places import ANYWHERE_HERE
from rollout_backend import OneDocumentRetriever, OnePointReward

from forage_proto.v1.trajectory_pb2 import ChatMessage, Policy, Prompt, Purpose, Sampling, Status, Trajectory
from forage_rollout.agent import Agent
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
FOLDER = Path(__file__).resolve().parents[3] / "models/tiny-policy"
SIZES = {"max_start_length": 256, "max_prompt_length": 640, "max_response_length": 40}
TOLERANCE = 1e-3
QUESTION = "Answer the given question. Question: What is the capital of Mongolia?"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Agent]:
    weights = {"cache_dir": tmp_path_factory.mktemp("cache")}
    sizes = EngineSettings(max_model_len=768, max_num_seqs=32, hang_timeout_s=300.0)
    rollout = RolloutSettings(**SIZES, engine=sizes, weights=weights)
    settings = Settings(model=ModelSettings(path=FOLDER), rollout=rollout, security=ANYWHERE_HERE)
    engine = VllmEngine(settings)
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    await engine.load_policy(Policy(version=7, epoch=3, uri=str(FOLDER), digest=digest))
    yield Agent(settings, engine, OneDocumentRetriever(), OnePointReward(), FileTokenizer(FOLDER), "<|im_end|>", "a")
    engine.shutdown()


def build_prompt(environment: str, **fields: Any) -> Prompt:
    known: dict[str, Any] = {"run_id": "r", "group_uid": "g", "data_source": "s", "samples": 3}
    messages = [ChatMessage(role="user", content=QUESTION)]
    sampling, purpose = Sampling(temperature=1.0, seed=11), Purpose.PURPOSE_TRAIN
    return Prompt(**known, messages=messages, sampling=sampling, purpose=purpose, environment=environment, **fields)


async def chat(agent: Agent, taken: dict[str, Any], messages: list[dict[str, str]]) -> str:
    body = json.dumps({"messages": messages}).encode()
    reply = await agent.sessions.answer(taken["id"], taken["key"], "chat/completions", body)
    assert reply.status == 200, reply.content
    return str(json.loads(reply.content)["choices"][0]["message"]["content"])


async def work(agent: Agent, follow_ups: list[str]) -> None:
    """A worker in this process: asks the question, and goes on with these texts."""
    while True:
        while (taken := agent.sessions.take()) is None:
            await asyncio.sleep(0.01)
        messages = list(taken["task"]["messages"])
        for text in [*follow_ups, ""]:
            messages.append({"role": "assistant", "content": await chat(agent, taken, messages)})
            messages.append({"role": "user", "content": text})
        await agent.sessions.answer(taken["id"], taken["key"], "end", b"{}")


async def run_sessions(agent: Agent, follow_ups: list[str]) -> list[Trajectory]:
    worker = asyncio.create_task(work(agent, follow_ups))
    group = await agent.run_group(build_prompt("external"))
    worker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await worker
    assert [t.status for t in group.trajectories] == [Status.STATUS_OK] * 3
    return list(group.trajectories)


def compute_log_probs(trajectory: Trajectory) -> list[float]:
    """Those of the sampled tokens, by a plain forward pass of each turn's context."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    found = []
    for turn in trajectory.turns:
        own = [i for i, id in enumerate(trajectory.turn_ids) if id == turn.index]
        begin, end = trajectory.prompt_length + own[0], trajectory.prompt_length + own[-1] + 1
        ids = torch.tensor([trajectory.token_ids[turn.context_begin : end]])
        with torch.no_grad():
            rows = torch.log_softmax(model(ids).logits[0, begin - turn.context_begin - 1 : -1], -1)
        found += rows.gather(1, ids[0, begin - turn.context_begin :, None])[:, 0].tolist()
    return found


async def test_a_session_of_one_turn_is_the_built_in_loop_s_trajectory(agent: Agent) -> None:
    through_sessions = await run_sessions(agent, [])
    group = await agent.run_group(build_prompt("single_turn"))  # which stops at an answer; a session does not
    for ours, theirs in zip(through_sessions, group.trajectories, strict=True):
        length = len(theirs.token_ids)
        assert list(ours.token_ids[:length]) == list(theirs.token_ids)
        assert list(ours.logprobs[: len(theirs.logprobs)]) == pytest.approx(list(theirs.logprobs), abs=TOLERANCE)
        assert ours.prompt_length == theirs.prompt_length
        assert {(s.version, s.epoch) for s in ours.segments} == {(7, 3)}


async def test_every_turn_has_the_log_probabilities_of_its_own_context(agent: Agent) -> None:
    for trajectory in await run_sessions(agent, ["Go on.", "And <answer>?"]):
        assert len(trajectory.turns) == 3
        sampled = [p for p, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if mask]
        assert sampled == pytest.approx(compute_log_probs(trajectory), abs=TOLERANCE)
        assert sum(s.end - s.begin for s in trajectory.segments) == len(sampled)
        assert not any(turn.context_begin for turn in trajectory.turns), "the template of this policy rewrites nothing"
