"""The OpenAI client against the HTTP API over a real vLLM engine on a tiny random model."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import uvicorn
from policy_places import ANYWHERE_HERE
from rollout_backend import AgentBackend, LineEngine
from waiting import wait_until_async

from forage_probe.completions import CompletionsClient, Continuations
from forage_probe.contexts import CONNECTIVE
from forage_proto.v1.trajectory_pb2 import Policy, Sampling
from forage_rollout.engine.endpoint_engine import EndpointEngine
from forage_rollout.engine.openai import OpenAiRoutes, ResponseHead
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import GenerationRequest
from forage_rollout.loop.tokens import FileTokenizer
from forage_rollout.serve.backend import ServiceState
from forage_rollout.serve.http_api import make_app
from forage_rollout.vllm_start.vllm_args import BLOCK_SIZE
from forage_runtime.clients.calls import RefusedError
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_runtime.telemetry.health import Health

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
CHAT: Any = [{"role": "user", "content": "the capital of France"}]


class EngineBackend(AgentBackend):
    """`AgentBackend`, with an engine for the OpenAI-compatible endpoints."""

    def __init__(self, settings: Settings, engine: LineEngine, served: OpenAiRoutes) -> None:
        super().__init__(settings, engine)
        self._served = served

    async def forward_openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        async for part in self._served.forward_openai(method, path, headers, body):
            yield part


@dataclass
class Parts:
    engine: VllmEngine
    client: openai.AsyncOpenAI
    settings: Settings
    model: str
    other: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(make_model: Callable[[int], Path], char_codec: Any) -> AsyncIterator[Parts]:
    folder = make_model(0)
    template = folder / "chat_template.jinja"
    shouting = "{% if shout is defined %}{{ shout ~ strftime_now('%Y-%m-%d') }}{% endif %}"
    template.write_text(template.read_text(encoding="utf-8").rstrip("\n") + shouting, encoding="utf-8")
    rollout = RolloutSettings(engine=EngineSettings(max_model_len=768, max_num_seqs=64))
    data = {"template_date": "2001-02-03"}
    settings = Settings(model=ModelSettings(path=folder), rollout=rollout, security=ANYWHERE_HERE, data=data)
    engine = VllmEngine(settings)
    backend = EngineBackend(settings, LineEngine(char_codec()), OpenAiRoutes(engine, settings))
    app = make_app(backend, ServiceState(Health(), running=True), settings)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.create_task(server.serve())
    await wait_until_async(lambda: server.started)
    address = f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    client = openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=300)
    served_settings = settings.model_copy(update={"rollout": rollout.model_copy(update={"http_address": address})})
    yield Parts(engine, client, served_settings, folder.name, make_model(1))
    await client.close()
    server.should_exit = True
    await serving
    engine.shutdown()


async def join_text(stream: Any) -> str:
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert len(parts) > 2  # it came in pieces
    return "".join(parts)


async def test_the_model_is_listed_by_its_folder_name_and_its_path_is_not_shown(parts: Parts) -> None:
    (model,) = [model async for model in parts.client.models.list()]
    assert model.id == parts.model
    assert "/" not in str(model.model_dump())


async def test_chats_and_completions_answer_with_and_without_stream(parts: Parts) -> None:
    chat: Any = {"model": parts.model, "messages": CHAT, "temperature": 0, "max_tokens": 12}
    whole = await parts.client.chat.completions.create(**chat)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12
    assert await join_text(await parts.client.chat.completions.create(**chat, stream=True)) == (
        whole.choices[0].message.content
    )
    asked: Any = {"model": parts.model, "prompt": "the search for", "temperature": 0, "max_tokens": 12}
    completion = await parts.client.completions.create(**asked, logprobs=1)
    assert len(completion.choices[0].logprobs.token_logprobs) == 12
    stream = await parts.client.completions.create(**asked, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == completion.choices[0].text


async def test_a_request_has_variables_of_its_own_and_the_template_the_date_of_the_run(parts: Parts) -> None:
    chat: Any = {"model": parts.model, "messages": CHAT, "temperature": 0, "max_tokens": 1}
    plain, shouted = [
        await parts.client.chat.completions.create(**chat, extra_body={"return_token_ids": True, **more})
        for more in ({}, {"chat_template_kwargs": {"shout": "aha"}})
    ]
    before, after = (reply.model_extra["prompt_token_ids"] for reply in (plain, shouted))
    assert after[: len(before)] == before
    assert FileTokenizer(parts.settings.model.path).decode(after[len(before) :]) == "aha2001-02-03"


async def test_an_engine_at_an_endpoint_samples_the_same_tokens_as_the_engine(parts: Parts) -> None:
    rollout = RolloutSettings(engine=EngineSettings(endpoint=f"http://{parts.settings.rollout.http_address}/v1"))
    remote = EndpointEngine(parts.settings.model_copy(update={"rollout": rollout}))
    await remote.connect()
    prompt = await parts.engine.render_chat(CHAT)
    context = prompt.token_ids
    assert await remote.render_chat(CHAT) == prompt
    for stop in ((), ("a",)):
        for temperature, seed in ((0.0, None), (1.0, 7)):
            asked = GenerationRequest(context, 24, temperature, 0.9, 20, seed, stop, min_tokens=3)
            one, other = await parts.engine.generate(asked), await remote.generate(asked)
            assert (one.token_ids, one.hit_length) == (other.token_ids, other.hit_length)
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


async def test_errors_of_vllm_reach_the_client(parts: Parts) -> None:
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        await parts.client.chat.completions.create(model="other", messages=CHAT)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await parts.client.chat.completions.create(model=parts.model, messages=CHAT, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="768"):
        await parts.client.completions.create(model=parts.model, prompt="a" * 4000)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 2.5}, r"temperature must be in \[0, 2\], got 2\.5"),
        ({"temperature": 0, "n": 2}, "n must be 1 when using greedy sampling, got 2"),
        ({"max_tokens": 2, "extra_body": {"min_tokens": 3}}, "min_tokens must be less than or equal to max_tokens=2"),
        ({"extra_body": {"top_k": -5}}, "top_k must be 0"),
    ],
)
async def test_bounds_of_vllm_are_told_in_its_words(parts: Parts, values: dict[str, Any], words: str) -> None:
    calls: Any = ((parts.client.chat.completions, {"messages": CHAT}), (parts.client.completions, {"prompt": "a"}))
    for call, asked in calls:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            await call.create(model=parts.model, **asked, **values)
        assert caught.value.body["type"]
    parameter, said = parts.engine.check_sampling(Sampling(temperature=2.5))
    assert (parameter, said) == ("temperature", "temperature must be in [0, 2], got 2.5")
    assert parts.engine.check_sampling(Sampling(temperature=2, top_p=0.5)) == ("", "")
    with pytest.raises(RefusedError, match="temperature must be in"):
        await parts.engine.generate(GenerationRequest([5], 4, 2.5, 1.0, -1, None))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_that_is_sent_again_keeps_its_tokens_or_says_where_they_differ(parts: Parts, stream: bool) -> None:
    chats = parts.client.chat.completions.with_raw_response
    messages = [{"role": "user", "content": f"the search {stream}"}]
    before: list[int] = []
    seen = set()
    for turn in range(4):
        asked: Any = {"model": parts.model, "messages": messages, "max_tokens": 16, "seed": turn + 1, "temperature": 1}
        raw = await chats.create(**asked, stream=stream, extra_body={"return_token_ids": True})
        reply: Any = raw.parse()
        if stream:
            chunks = [chunk async for chunk in reply]
            prompt = next(ids for chunk in chunks if (ids := getattr(chunk, "prompt_token_ids", None)))
            choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
            text = "".join(choice.delta.content or "" for choice in choices)
        else:
            prompt, choices = reply.prompt_token_ids, reply.choices
            text = choices[0].message.content
        history = raw.headers.get("forage-history")
        seen.add(history)
        if turn == 0:
            assert history is None
        elif history == "exact":
            assert prompt[: len(before)] == before
        else:
            same = int(history.removeprefix("changed-from="))
            assert prompt[:same] == before[:same]
            assert prompt[same] != before[same]
        before = prompt + [token for choice in choices for token in getattr(choice, "token_ids", None) or ()]
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    assert "exact" in seen, seen
    raw = await chats.create(model=parts.model, messages=[*CHAT, {"role": "assistant", "content": "x"}, *CHAT])
    assert raw.headers["forage-history"] == "unknown"


async def test_a_client_that_disconnects_ends_its_generation(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted, abort = [], parts.engine.llm.abort

    async def note_abort(*which: Any, **how: Any) -> None:
        aborted.append(which)
        await abort(*which, **how)

    monkeypatch.setattr(parts.engine.llm, "abort", note_abort)
    endless: Any = {"model": parts.model, "messages": CHAT, "max_tokens": 600, "extra_body": {"ignore_eos": True}}
    stream = await parts.client.chat.completions.create(**endless, stream=True)
    await anext(aiter(stream))
    assert parts.engine.llm.output_processor.has_unfinished_requests()
    await stream.close()
    await wait_until_async(lambda: not parts.engine.llm.output_processor.has_unfinished_requests())
    whole = asyncio.create_task(parts.client.chat.completions.create(**endless))
    await wait_until_async(parts.engine.llm.output_processor.has_unfinished_requests)
    whole.cancel()
    await wait_until_async(lambda: not parts.engine.llm.output_processor.has_unfinished_requests())
    assert len(aborted) == 2, "each ended with its client, and not with its last token"


async def test_many_samples_of_one_context_are_seeded_and_share_its_prefix(parts: Parts) -> None:
    """The requests of a probe."""
    context = parts.engine.llm.get_tokenizer().encode("the capital of France is Paris, " * 9)
    async with CompletionsClient(parts.settings) as completions:
        assert completions.max_model_len == 768
        connective = await completions.encode(CONNECTIVE)
        assert parts.engine.llm.get_tokenizer().decode(connective) == CONNECTIVE

        async def sample(ids: list[int], seed: int) -> Continuations:
            return await completions.sample([*ids, *connective], 8, seed, 12, "</answer>")

        first, again, other = await sample(context, 5), await sample(context, 5), await sample(context, 500)
        assert first.texts == again.texts != other.texts
        assert len(set(first.texts)) > 4  # each sample has a seed of its own
        assert 8 <= first.generated_tokens <= 8 * 12
        whole = len(context) + len(connective)
        assert first.cached_tokens == (whole - 1) // BLOCK_SIZE * BLOCK_SIZE  # the first computed it for the others
        longer = await sample([*context, *context], 5)  # begins with blocks that are there, and adds its own
        assert longer.cached_tokens == (whole + len(context) - 1) // BLOCK_SIZE * BLOCK_SIZE
        with pytest.raises(RefusedError, match="768"):
            await sample(context * 20, 5)


async def test_after_an_update_the_new_policy_answers(parts: Parts) -> None:
    chat: Any = {"model": parts.model, "messages": CHAT, "temperature": 0, "max_tokens": 12}
    before = await parts.client.chat.completions.create(**chat)
    digest = hashlib.sha256((parts.other / "model.safetensors").read_bytes()).hexdigest()
    await parts.engine.load_policy(Policy(version=1, epoch=1, uri=str(parts.other), digest=digest))
    after = await parts.client.chat.completions.create(**chat)
    assert after.choices[0].message.content != before.choices[0].message.content
