"""`/v1/…` over a real server, the agent behind it real, the engine scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from google.protobuf.json_format import ParseDict
from otlp_receiver import Receiver
from rollout_backend import LINES, AgentBackend, LineEngine
from waiting import wait_until_async as wait_until

from forage_proto.v1.trajectory_pb2 import Sampling, TrajectoryGroup
from forage_rollout.engine.sampling_parameters import RefusedSamplingError, find_refusal
from forage_rollout.engine.stops import StopTexts
from forage_rollout.serve.backend import ServiceState
from forage_rollout.serve.http_api import MAX_BODY_BYTES, make_app
from forage_runtime.security.token_file import TokenFile
from forage_runtime.settings import EngineSettings, RolloutSettings, Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.health import Health

SIZES = {"max_start_length": 2000, "max_prompt_length": 5000, "max_obs_length": 500, "max_response_length": 500}


@pytest.fixture
def settings() -> Settings:
    return Settings(rollout=RolloutSettings(**SIZES, engine=EngineSettings(max_model_len=9999)))


@pytest.fixture
def engine(char_codec: Any) -> LineEngine:
    engine = LineEngine(char_codec())
    engine.gate.set()
    return engine


@pytest.fixture
def backend(settings: Settings, engine: LineEngine) -> AgentBackend:
    return AgentBackend(settings, engine)


@pytest.fixture
def state() -> ServiceState:
    state = ServiceState(Health())
    state.health.mark_started()
    state.running = True
    return state


@contextlib.asynccontextmanager
async def open_client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    server.capture_signals = contextlib.nullcontext
    running = asyncio.create_task(server.serve())
    await wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=300) as client:
        yield client
    server.should_exit = True
    await running


@pytest.fixture
async def client(backend: AgentBackend, state: ServiceState, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(make_app(backend, state, settings)) as client:
        yield client


class Events:
    """Server-sent events of a response, one at a time."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self) -> tuple[str, dict[str, Any]]:
        fields: dict[str, str] = {}
        async for line in self._lines:
            if not line and fields:
                return fields["event"], json.loads(fields["data"])
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
        return "end", {}


async def test_turns_are_events_as_they_happen(client: httpx.AsyncClient, engine: LineEngine) -> None:
    engine.gate.clear()
    async with client.stream("POST", "/v1/ask", json={"question": "Who?"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = Events(response)
        name, turn = await events.next()
        assert (name, turn["action"], turn["content"], turn["text"]) == ("turn", "search", "who", LINES[0])
        name, observation = await events.next()
        assert (name, observation["turn"], observation["status"]) == ("observation", 1, "OK")
        assert observation["documents"] == [{"id": "d1", "contents": '"T"\nbody', "score": 0.5}]
        engine.gate.set()  # only now can the second turn end
        assert (await events.next())[1]["content"] == "me"
        name, done = await events.next()
        assert (name, done["answer"], done["answers"], done["status"]) == ("done", "me", ["me"], ["OK"])
        whole = ParseDict(done["group"], TrajectoryGroup())
        assert [len(t.turns) for t in whole.trajectories] == [2]
        assert await events.next() == ("end", {})
    assert "Question: Who?" in engine.codec.decode(engine.asked[0].token_ids)


async def test_without_stream_there_is_one_reply(client: httpx.AsyncClient, engine: LineEngine) -> None:
    chat = [{"role": "user", "content": "as it is"}]
    body = {"messages": chat, "samples": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "stream": False}
    response = await client.post("/v1/ask", json=body)
    assert response.status_code == 200
    assert response.json()["answers"] == ["me", "me"]
    asked = engine.asked[0]
    assert engine.codec.decode(asked.token_ids) == "as it is"
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.7, 0.9, 5)
    assert asked.seed is not None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_that_disconnects_ends_its_trajectories(
    client: httpx.AsyncClient, engine: LineEngine, stream: bool
) -> None:
    engine.gate.clear()
    asking = asyncio.create_task(client.post("/v1/ask", json={"question": "Who?", "samples": 3, "stream": stream}))
    await wait_until(lambda: len(engine.asked) == 6)
    asking.cancel()
    await wait_until(lambda: engine.cancelled == 3)


@pytest.mark.parametrize(
    ("body", "field", "sentence"),
    [
        ({}, None, "question, messages: expected exactly one of both"),
        ({"question": "x", "messages": [{"role": "user", "content": "x"}]}, None, "exactly one of both"),
        ({"question": ""}, "question", "question: String should have at least 1 character"),
        ({"question": "x", "temperature": -1}, "temperature", "greater than or equal to 0, not -1"),
        ({"question": "x", "top_p": 0}, "top_p", "greater than 0, not 0"),
        ({"question": "x", "samples": 2000}, "samples", "less than or equal to 1024, not 2000"),
        (
            {"question": "x", "timeout_s": "soon"},
            "timeout_s",
            'valid number, unable to parse string as a number, not "soon"',
        ),
        (
            {"question": "x", "environment": "math"},
            "environment",
            "environment: expected one of search, single_turn, external; or nothing = that of the data source, not 'ma",
        ),
        ({"question": "x", "temprature": 1}, "temprature", "Extra inputs are not permitted"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content: Field required"),
    ],
)
async def test_a_bad_question_is_refused_by_field(
    client: httpx.AsyncClient, body: dict[str, Any], field: str | None, sentence: str
) -> None:
    response = await client.post("/v1/ask", json=body)
    assert response.status_code == 422
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request", field)
    assert sentence in error["message"]


class VllmBackend(AgentBackend):
    """`AgentBackend` that asks vLLM for its bounds, as an engine does."""

    async def check_sampling(self, sampling: Sampling) -> None:
        parameter, words = find_refusal(sampling, StopTexts({}))
        if words:
            raise RefusedSamplingError(words, parameter)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_engine_does_not_take_is_refused_in_its_words(
    settings: Settings, engine: LineEngine, state: ServiceState, stream: bool
) -> None:
    async with open_client(make_app(VllmBackend(settings, engine), state, settings)) as client:
        response = await client.post("/v1/ask", json={"question": "x", "temperature": 2.5, "stream": stream})
        assert response.status_code == 400
        words = {"message": "temperature must be in [0, 2], got 2.5", "type": "invalid_request", "param": "temperature"}
        assert response.json() == {"error": words}
        assert not engine.asked
        response = await client.post("/v1/ask", json={"question": "x", "temperature": 2, "top_k": 3, "stream": stream})
        assert response.status_code == 200


async def test_a_question_may_name_its_environment(client: httpx.AsyncClient, engine: LineEngine) -> None:
    body = {"question": "Who?", "environment": "single_turn", "stream": False}
    group = (await client.post("/v1/ask", json=body)).json()["group"]
    assert len(group["trajectories"][0]["turns"]) == len(engine.asked) == 1, "nobody searches"


_HOSTILE = [
    *(b'{"question":"x","top_k":%d}' % number for number in (2**31, 2**63, -(2**31) - 1, 10**400)),
    b'{"question":"x","top_k":%s}' % (b"9" * 5000),
    *(b'{"question":"x","seed":%s}' % number for number in (b"9223372036854775807", b"9223372036854775808", b"1e30")),
    *(
        b'{"question":"x","%s":%s}' % (name, value)
        for name in (b"temperature", b"top_p", b"timeout_s")
        for value in (b"NaN", b"Infinity", b"1e400", b"-1e400", b"1e308", b"5e-324")
    ),
    *(
        b"{%s}" % pair
        for pair in (
            b'"question":"\\ud800"',
            b'"question":"x","data_source":"\\udfff"',
            b'"question":"x","environment":"\\ud800"',
            b'"question":"x","\\ud800":1',
            b'"messages":[{"role":"\\ud800","content":"x"}]',
            b'"messages":[{"role":"user","content":"\\ud800"}]',
            b'"messages":[{"role":"user","content":"x","\\ud800":1}]',
            b'"question":"x","samples":true',
            b'"question":"x","samples":1e2000',
        )
    ),
    b'{"question":"\\u0000","data_source":"\\u0000\\n\\""}',
    b'{"question":"\xff\xfe"}',
    b'{"question":%s}' % (b"[" * 100_000),
    b'{"question":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    b'{"messages":%s}' % (b"[" * 100_000),
    b"[]",
    b"null",
    b'"x"',
    b"",
    b"\x00",
]


async def test_hostile_bodies_are_refused_or_answered(client: httpx.AsyncClient) -> None:
    """Each of these has been, or might be, an error of the service."""
    for body in _HOSTILE:
        response = await client.post("/v1/ask", content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 422), (body[:80], response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"], body[:80]


async def test_a_body_that_is_not_json_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/ask", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.json()["error"]["type"] == "invalid_request"


@pytest.mark.parametrize(
    ("headers", "cause"),
    [
        ({}, "content-type must say application/json: there is none"),
        ({"content-type": "application/x-www-form-urlencoded"}, "it is application/x-www-form-urlencoded"),
    ],
)
async def test_another_content_type_is_named(client: httpx.AsyncClient, headers: dict[str, str], cause: str) -> None:
    response = await client.post("/v1/ask", content=b'{"question": "who?"}', headers=headers)
    assert response.status_code == 422
    assert cause in response.json()["error"]["message"]


async def test_a_body_that_is_too_large_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/ask", content=b" " * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413
    assert "larger than" in response.json()["error"]["message"]


async def test_before_the_start_the_reply_says_what_is_missing(client: httpx.AsyncClient, state: ServiceState) -> None:
    state.running = False
    state.health.wait_for("engine", "vLLM is starting")
    for path in ("/v1/ask", "/v1/completions"):
        response = await client.post(path, json={"question": "x"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "engine: vLLM is starting" in response.json()["error"]["message"]


async def test_a_dead_engine_is_an_error_of_the_reply_or_of_the_stream(
    client: httpx.AsyncClient, backend: AgentBackend
) -> None:
    backend.dead = True
    response = await client.post("/v1/ask", json={"question": "x", "stream": False})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable")
    async with client.stream("POST", "/v1/ask", json={"question": "x"}) as response:
        events = Events(response)
        names = [(await events.next())[0] for _ in range(5)]
    assert names == ["turn", "observation", "turn", "error", "end"]


async def test_openai_calls_are_forwarded_and_their_replies_streamed(
    client: httpx.AsyncClient, backend: AgentBackend
) -> None:
    headers = {"x-other": "1", "content-type": "application/json"}
    response = await client.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers)
    assert response.text == "data: 1\n\ndata: [DONE]\n\n"
    assert response.headers["content-type"].startswith("text/event-stream")
    await client.get("/v1/models")
    (method, path, passed, body), (get, models, _, _) = backend.passed
    assert (method, path, body) == ("POST", "/v1/completions", b'{"prompt":"x"}')
    assert ("content-type", "application/json") in passed
    assert "x-other" not in dict(passed)
    assert (get, models) == ("GET", "/v1/models")


async def test_an_unknown_path_is_an_error_of_the_same_form(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/ask")
    assert (response.status_code, response.json()["error"]["message"]) == (405, "Method Not Allowed")
    assert (await client.get("/nowhere")).json()["error"]["type"] == "invalid_request"


async def test_the_interface_is_described(client: httpx.AsyncClient) -> None:
    assert (await client.get("/docs")).status_code == 200
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert set(paths) == {
        *("/v1/ask", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/sessions/next"),
        *(f"/v1/sessions/{{session}}/{verb}" for verb in ("chat/completions", "keep", "end")),
    }


async def test_with_a_token_file_calls_need_the_token(
    backend: AgentBackend, state: ServiceState, settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    async with open_client(make_app(backend, state, settings, TokenFile(file))) as client:
        body = {"question": "x", "stream": False}
        for path in ("/v1/ask", "/v1/completions", "/v1/models"):
            response = await client.post(path, json=body)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            assert "asks for a token" in response.json()["error"]["message"]
        assert (await client.post("/v1/ask", json=body, headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await client.post("/v1/ask", json=body, headers={"authorization": "Bearer secret"})).status_code == 200
        assert (await client.get("/docs")).status_code == 200
        file.write_text("rotated")
        assert (await client.post("/v1/ask", json=body, headers={"authorization": "Bearer secret"})).status_code == 401
        assert (await client.post("/v1/ask", json=body, headers={"authorization": "Bearer rotated"})).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_question_belongs_to_the_trace_of_its_header(
    client: httpx.AsyncClient, receiver: Receiver, stream: bool
) -> None:
    with tracing.span("mine", parent="") as mine:
        body = {"question": "Who?", "stream": stream}
        response = await client.post("/v1/ask", json=body, headers=tracing.trace_headers())
    assert response.status_code == 200
    assert tracing.traceparent(mine)[3:35] in response.text, "the whole answer says so"
    # The server's side of a stream ends after the client's.
    await asyncio.to_thread(receiver.wait_for, lambda r: r.named("POST /v1/ask") and r.named("mine"))
    (outer,) = receiver.named("mine")
    (served,) = receiver.named("POST /v1/ask")
    (run,) = receiver.named("rollout.run")
    assert {served.trace_id, run.trace_id} == {tracing.traceparent(mine)[3:35]}
    assert (served.parent_id, run.parent_id) == (outer.span_id, served.span_id)
