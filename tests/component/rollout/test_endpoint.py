"""The loop over a remote OpenAI-compatible server in vLLM's place: a real server that returns given lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai_server import MODEL, OpenAIServer, serve_openai
from rollout_backend import OneDocumentRetriever, OnePointReward

from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Purpose, Sampling, Status, Trajectory
from forage_rollout.agent import Agent
from forage_rollout.engine.endpoint_engine import EndpointEngine, check_endpoint
from forage_rollout.loop.generation import GenerationRequest
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.errors import SettingsError
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_weights.announcement import PolicyError

MODEL_FOLDER = Path(__file__).resolve().parents[3] / "models" / "tiny-policy"
CODEC = FileTokenizer(MODEL_FOLDER)
LINES = ("<think> hm </think>\n<search> who </search>", "<think> so </think>\n<answer> me </answer>")
STOPS = ("</search>", "</answer>")
ASKED = GenerationRequest(CODEC.encode("Who?"), 32, 0.5, 0.9, -1, 7, STOPS)


def build_settings(url: str, **engine: Any) -> Settings:
    known: dict[str, Any] = {"endpoint": url, "hang_timeout_s": 300.0}
    rollout = RolloutSettings(engine=EngineSettings(**known | engine))
    return Settings(model=ModelSettings(path=MODEL_FOLDER), rollout=rollout)


@asynccontextmanager
async def serve_lines(lines: Any = LINES, engine: Any = None, **how: Any) -> AsyncIterator[tuple[OpenAIServer, Any]]:
    with serve_openai(CODEC, lines, **how) as server:
        made = EndpointEngine(build_settings(server.url, **engine or {}))
        await made.connect()
        server.asked.clear()
        yield server, made


async def run(server: OpenAIServer, engine: EndpointEngine, **fields: Any) -> list[Trajectory]:
    agent = Agent(
        build_settings(server.url), engine, OneDocumentRetriever(), OnePointReward(), CODEC, "<eos>", "replica-1"
    )
    known = {"group_uid": "g", "samples": 2, "token_ids": CODEC.encode("Who?"), "sampling": Sampling(seed=5)}
    return list((await agent.run_group(Prompt(**{**known, **fields}))).trajectories)


@pytest.mark.parametrize("how", [{}, {"vllm": False}, {"vllm": False, "strict": True}])
async def test_trajectories_are_the_same_in_every_dialect(how: dict[str, Any]) -> None:
    async with serve_lines(**how) as (server, engine):
        one, other = await run(server, engine)
    assert one.status == other.status == Status.STATUS_OK
    assert [span.text for span in one.spans if span.role == 2] == list(LINES)
    assert (one.finished, one.valid_searches, one.turns[1].content) == (True, 1, "me")
    begin = one.prompt_length
    assert one.token_ids[begin : begin + one.spans[1].end - one.spans[1].begin] == CODEC.encode(LINES[0])
    own = [logprob for logprob, mask in zip(one.logprobs, one.loss_mask, strict=True) if mask]
    assert set(own) == ({0.0} if how else {-0.5}), "a server that tells no logprobs leaves 0"
    assert len({body["seed"] for body in server.asked}) == 4, "each generation has a seed of its own"
    assert all(body["stop"] == list(STOPS) and isinstance(body["prompt"], str) == bool(how) for body in server.asked)
    assert engine.counts.requests == 4
    assert engine.counts.cached_prompt_tokens == (0 if how else 12)


async def test_a_vllm_endpoint_returns_tokens_as_they_were_sampled() -> None:
    async with serve_lines() as (server, engine):
        generation = await engine.generate(ASKED)
    (body,) = server.asked
    assert generation.token_ids == CODEC.encode(LINES[0])
    assert (generation.hit_length, generation.versions) == (False, [(0, 0, 0, len(generation.token_ids))])
    sampling = {name: body[name] for name in ("temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens")}
    assert sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "seed": 7,
        "max_tokens": 32,
        "min_tokens": 0,
    }
    assert body["include_stop_str_in_output"] is True
    assert body["skip_special_tokens"] is False


@pytest.mark.parametrize("how", [{}, {"vllm": False}])
async def test_a_generation_ended_by_its_length_hits_length(how: dict[str, Any]) -> None:
    async with serve_lines(lines=["<think> " + "on and " * 50], **how) as (_, engine):
        generation = await engine.generate(ASKED)
    assert generation.hit_length
    assert len(generation.token_ids) == 32


async def test_transient_errors_are_retried_and_others_reported() -> None:
    async with serve_lines() as (server, engine):
        server.failures += [429, 503, 500]
        assert (await engine.generate(ASKED)).token_ids
        assert server.failures == []
        for status, words in (
            (401, r"refused a request \(401\).*look at rollout.engine.endpoint_token_file"),
            (404, r"refused a request \(404\).*look at rollout.engine.endpoint and"),
            (400, r"refused a request \(400\)"),
        ):
            server.failures.append(status)
            with pytest.raises(RefusedError, match=words):
                await engine.generate(ASKED)
        server.failures.append(200)
        with pytest.raises(MalformedReplyError, match="does not have OpenAI's format"):
            await engine.generate(ASKED)
        server.failures.append(401)
        (trajectory,) = await run(server, engine, samples=1)
        assert trajectory.status == Status.STATUS_INVALID_INPUT
        assert "refused a request (401)" in trajectory.status_detail


async def test_an_unavailable_endpoint_fails_trajectories_within_their_time_limit() -> None:
    async with serve_lines(engine={"hang_timeout_s": 0.5}) as (server, engine):
        server.failures += [503] * 50
        (trajectory,) = await run(server, engine, samples=1)
        assert trajectory.status == Status.STATUS_TIMEOUT
        assert f"the endpoint at {server.url} gave no answer within 0.5 s" in trajectory.status_detail
        server.failures.clear()
        while (await run(server, engine, samples=1))[0].status == Status.STATUS_TIMEOUT:
            pass  # a slow machine may need longer for the first answer


@pytest.mark.parametrize("purpose", [Purpose.PURPOSE_TRAIN, Purpose.PURPOSE_VALIDATION])
async def test_an_endpoint_is_not_trained(purpose: Purpose.ValueType) -> None:
    async with serve_lines() as (server, engine):
        (trajectory,) = await run(server, engine, samples=1, purpose=purpose)
    if purpose == Purpose.PURPOSE_TRAIN:
        assert trajectory.status == Status.STATUS_INVALID_INPUT
        assert "does not serve the policy that is trained: unset rollout.engine.endpoint" in trajectory.status_detail
        assert server.asked == []
    else:
        assert trajectory.status == Status.STATUS_OK


async def test_an_endpoints_weights_cannot_be_replaced() -> None:
    async with serve_lines() as (server, engine):
        with pytest.raises(PolicyError, match=r"policy version 3 of epoch 1 at /x cannot be loaded.*of its own"):
            await engine.load_policy(Policy(version=3, epoch=1, uri="/x"))
        assert engine.serving == Policy(uri=server.url)


async def test_a_pause_of_an_endpoint_lets_running_requests_end_and_holds_new_ones() -> None:
    async with serve_lines() as (server, engine):
        running = [asyncio.create_task(engine.generate(ASKED)) for _ in range(3)]
        await asyncio.sleep(0)
        await engine.pause(drain=False)
        assert all(task.done() for task in running)
        assert engine.counts.paused == 1
        held = asyncio.create_task(engine.generate(ASKED))
        await asyncio.sleep(0.05)
        assert len(server.asked) == 3
        await engine.resume()
        assert (await held).token_ids


async def test_a_chat_is_rendered_by_the_models_template() -> None:
    async with serve_lines() as (_, engine):
        ids = (await engine.render_chat([{"role": "user", "content": "Who?"}])).token_ids
    assert "Who?" in CODEC.decode(ids)
    assert engine.end_of_turn in CODEC.decode(ids)


async def test_openai_calls_are_forwarded_with_the_endpoints_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    engine = {"endpoint_token_file": tmp_path / "token", "endpoint_model": MODEL}
    async with serve_lines(engine=engine, token="secret", models=(MODEL, "other")) as (_, made):
        head, *parts = [part async for part in made.forward_openai("GET", "/v1/models", [], b"")]
        assert head[0] == 200
        assert [card["id"] for card in json.loads(b"".join(parts))["data"]] == [MODEL]
        body = json.dumps({"model": MODEL, "prompt": "Who?", "max_tokens": 32}).encode()
        head, *parts = [
            part async for part in made.forward_openai("POST", "/v1/completions", [("authorization", "x")], body)
        ]
        assert head == (200, [("content-type", "application/json")])
        assert json.loads(b"".join(parts))["choices"][0]["text"] == LINES[0]
        (tmp_path / "token").write_text(["rotated", " and wrong"][0])
        with pytest.raises(RefusedError, match="401"):
            await made.generate(ASKED)


@pytest.mark.parametrize(
    ("how", "engine", "words"),
    [
        ({"models": ("a", "b")}, {}, "rollout.engine.endpoint_model is '': .* serves a, b; give one of these"),
        ({}, {"endpoint_model": "x"}, "rollout.engine.endpoint_model is 'x': .* serves a-model"),
        ({"models": ()}, {}, r"refused a request \(404\)"),
        ({"models": ()}, {"endpoint_model": "x"}, "no model x"),
        ({"token": "secret"}, {}, r"refused a request \(401\).*endpoint_token_file"),
        ({"max_model_len": 500}, {}, "rollout.engine.max_model_len is 768: a-model at .* takes 500 tokens"),
    ],
)
async def test_an_unusable_endpoint_is_refused_at_the_start(
    how: dict[str, Any], engine: dict[str, Any], words: str
) -> None:
    with serve_openai(CODEC, LINES, **how) as server, pytest.raises(SettingsError, match=words):
        await check_endpoint(build_settings(server.url, **engine))


async def test_a_model_with_another_tokenizer_is_refused(char_codec: Any) -> None:
    with (
        serve_openai(char_codec(), LINES) as server,
        pytest.raises(SettingsError, match=r"another tokenizer than model\.path"),
    ):
        await check_endpoint(build_settings(server.url))


async def test_an_unreachable_endpoint_is_reported_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forage_rollout.engine.endpoint.START_TIMEOUT_S", 0.3)
    with pytest.raises(SettingsError, match=r"no answer within 0.3 s.*look at rollout.engine.endpoint"):
        await check_endpoint(build_settings("http://127.0.0.1:9/v1"))
    await check_endpoint(Settings())


async def test_the_text_dialect_refuses_top_k_and_min_tokens() -> None:
    async with serve_lines(vllm=False) as (_, engine):
        with pytest.raises(RefusedError, match=r"top_k is 5: .* supports temperature and top_p only"):
            await engine.generate(GenerationRequest([1], 8, 1.0, 1.0, 5, None))
        with pytest.raises(RefusedError, match="min_tokens is 2"):
            await engine.generate(GenerationRequest([1], 8, 1.0, 1.0, -1, None, min_tokens=2))
