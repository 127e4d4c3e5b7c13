"""Sessions over a real server: OpenAI's client, workers that are killed, the streams; the engine is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from dispatcher_bench import Bench, build_prompt
from rollout_backend import AgentBackend
from waiting import wait_until_async

from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    ChatMessage,
    GroundTruth,
    Prompt,
    Purpose,
    Sampling,
    Status,
    TemplateValues,
    Trajectory,
)
from forage_rollout.command.worker import Client, Task, Worker
from forage_rollout.engine.chat import render_chat as render_chat_ids
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_rollout.serve.backend import ServiceState
from forage_rollout.serve.http_api import make_app
from forage_rollout.sessions import session as sessions
from forage_runtime.security.token_file import TokenFile
from forage_runtime.settings import EngineSettings, RolloutSettings, Settings
from forage_runtime.settings.rollout import EnvironmentRoute
from forage_runtime.telemetry.health import Health
from forage_runtime.text.chat_template import Chat

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = REPOSITORY / "examples/agents/answer.py"
SIZES = {"max_start_length": 200, "max_prompt_length": 5000, "max_obs_length": 500, "max_response_length": 500}
SETTINGS = Settings(
    rollout=RolloutSettings(
        **SIZES, engine=EngineSettings(max_model_len=9999), environments={"s": EnvironmentRoute(name="external")}
    )
)


@dataclass
class ChatEngine:
    """Replies with `turn <turn>`, and from the second turn on with an answer, in `<role>text|` for each message."""

    codec: Any
    asked: list[GenerationRequest] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        text = "".join(f"<{message['role']}>{message['content']}|" for message in messages)
        return RenderedPrompt(self.codec.encode(f"{text}<assistant>"))

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        turns = self.codec.decode(request.token_ids).count("<assistant>")
        ids = self.codec.encode("turn 1|" if turns == 1 else f"<answer>{turns}</answer>|")
        return Generation(ids, [-turns / 8] * len(ids), False, [(turns, 2, 0, len(ids))])

    async def release(self, affinity: str) -> None:
        pass


@dataclass
class Service:
    url: str
    backend: AgentBackend
    engine: ChatEngine
    http: httpx.AsyncClient

    @property
    def counts(self) -> Any:
        return self.backend._agent.counts

    async def take(self) -> dict[str, Any]:
        async def look() -> dict[str, Any] | None:
            reply = await self.http.post("/v1/sessions/next", json={})
            return dict(reply.json()) if reply.status_code == 200 else None

        while (taken := await look()) is None:
            await asyncio.sleep(0.01)
        return taken

    async def post(self, taken: dict[str, Any], verb: str, body: Any, key: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {key or taken['key']}"}
        return await self.http.post(f"{taken['base_url']}/{verb}", json=body, headers=headers)


@contextlib.asynccontextmanager
async def serve(codec: Any, settings: Settings = SETTINGS, token: TokenFile | None = None) -> AsyncIterator[Service]:
    state = ServiceState(Health())
    state.running = True
    engine = ChatEngine(codec)
    backend = AgentBackend(settings, engine)
    app = make_app(backend, state, settings, token)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    server.capture_signals = contextlib.nullcontext
    running = asyncio.create_task(server.serve())
    await wait_until_async(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        yield Service(url, backend, engine, http)
    server.should_exit = True
    await running


@pytest.fixture
async def service(char_codec: Any) -> AsyncIterator[Service]:
    async with serve(char_codec(special=["|"])) as service:
        yield service


def build_question(**fields: Any) -> Prompt:
    known: dict[str, Any] = {
        "run_id": "r",
        "group_uid": "g/0",
        "data_source": "s",
        "messages": [ChatMessage(role="user", content="Who?")],
        "ground_truth": GroundTruth(targets=["2"]),
        "samples": 2,
        "sampling": Sampling(temperature=1.0, seed=5),
        "purpose": Purpose.PURPOSE_TRAIN,
    }
    return Prompt(**{**known, **fields})


def check_exact(trajectory: Trajectory, codec: Any) -> None:
    """Check that it is the whole conversation, and that exactly the replies are trained on."""
    assert codec.decode(trajectory.token_ids).count("<assistant>") == len(trajectory.turns)
    response = trajectory.token_ids[trajectory.prompt_length :]
    own = [id for id, mask in zip(response, trajectory.loss_mask, strict=True) if mask]
    assert codec.decode(own) == "turn 1|<answer>2</answer>|"
    assert [(s.version, s.end - s.begin) for s in trajectory.segments] == [(1, 7), (2, 19)]
    by_turn = [p for p, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if mask]
    assert by_turn == [-0.125] * 7 + [-0.25] * 19
    assert not any(turn.context_begin for turn in trajectory.turns)


async def answer_with_openai(task: Task, client: Client) -> float:
    from forage_runtime.user_code import load_object

    return float(await load_object(f"{EXAMPLE}:run")(task, client))


async def test_an_openai_client_in_a_worker_is_trained_on_token_for_token(service: Service) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    worker = asyncio.create_task(Worker(answer_with_openai, service.url).work(2))
    group = await service.backend.run_group(build_question())
    worker.cancel()
    assert [t.id for t in group.trajectories] == ["r/g/0/0", "r/g/0/1"]
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.finished) == (Status.STATUS_OK, True)
        assert (trajectory.score.total, trajectory.score.reward) == (1.0, "worker")
        assert trajectory.validation_score.status == Status.STATUS_OK
        kinds = [(turn.action, turn.executed) for turn in trajectory.turns]
        assert kinds == [(ActionKind.ACTION_KIND_SEARCH, True), (ActionKind.ACTION_KIND_ANSWER, False)]
        assert trajectory.turns[1].content == "2"
        check_exact(trajectory, service.engine.codec)
    seeds = {(asked.seed, asked.temperature) for asked in service.engine.asked}
    assert len(seeds) == 4, "as in the loop: of each sample and turn, at the run's temperature"
    assert {temperature for _, temperature in seeds} == {1.0}
    assert service.counts.sessions_repeated == 0


async def test_a_session_without_a_reward_is_scored_by_the_service_and_a_stream_is_one_chunk(service: Service) -> None:
    running = asyncio.create_task(service.backend.run_group(build_question(samples=1)))
    taken = await service.take()
    client = openai.AsyncOpenAI(base_url=f"{service.url}{taken['base_url']}", api_key=taken["key"])
    messages: Any = [{"role": "user", "content": "Who?"}]
    options = {"include_usage": True}
    stream = await client.chat.completions.create(model="m", messages=messages, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "turn 1"
    assert (chunks[1].choices[0].finish_reason, chunks[-1].usage.completion_tokens) == ("stop", 7)
    with pytest.raises(openai.BadRequestError, match="sessions do not support it"):
        await client.chat.completions.create(model="m", messages=messages, n=2)
    assert (await service.post(taken, "end", {})).status_code == 200
    (trajectory,) = (await running).trajectories
    assert (trajectory.status, trajectory.score.total, trajectory.score.reward) == (Status.STATUS_OK, 1.0, "")
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("ending", "asks", "status", "sentence"),
    [
        ({"error": "KeyError: 'x'"}, True, Status.STATUS_INTERNAL, "the worker's agent failed: KeyError: 'x'"),
        ({"reward": 1.0}, False, Status.STATUS_INVALID_INPUT, "ended the session without a request"),
    ],
)
async def test_a_session_that_fails_is_in_no_loss(
    service: Service, ending: dict[str, Any], asks: bool, status: int, sentence: str
) -> None:
    running = asyncio.create_task(service.backend.run_group(build_question(samples=1)))
    taken = await service.take()
    if asks:
        await service.post(taken, "chat/completions", {"messages": [{"role": "user", "content": "Who?"}]})
    await service.post(taken, "end", ending)
    (trajectory,) = (await running).trajectories
    assert trajectory.status == status
    assert sentence in trajectory.status_detail
    assert not trajectory.HasField("score")


async def test_a_session_is_limited_in_time_from_when_it_is_taken(char_codec: Any) -> None:
    async with serve(char_codec(special=["|"])) as service:
        running = asyncio.create_task(service.backend.run_group(build_question(samples=1, timeout_s=0.2)))
        await asyncio.sleep(0.4)
        assert not running.done(), "nobody has taken it"
        taken = await service.take()
        (trajectory,) = (await running).trajectories
        assert trajectory.status == Status.STATUS_TIMEOUT
        assert (await service.post(taken, "keep", {})).status_code == 410


async def test_a_session_needs_its_key_and_a_worker_the_token(char_codec: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    async with serve(char_codec(special=["|"]), token=TokenFile(tmp_path / "token")) as service:
        running = asyncio.create_task(service.backend.run_group(build_question(samples=1)))
        assert (await service.http.post("/v1/sessions/next", json={})).status_code == 401
        service.http.headers["authorization"] = "Bearer secret"
        taken = await service.take()
        body = {"messages": [{"role": "user", "content": "Who?"}]}
        for key in ("secret", "wrong"):
            for verb in ("chat/completions", "keep", "end"):
                assert (await service.post(taken, verb, body, key)).status_code == 401
        assert (await service.post({**taken, "base_url": "/v1/sessions/a.b"}, "keep", {})).status_code == 410
        assert (
            await service.http.post("/v1/ask", headers={"authorization": f"Bearer {taken['key']}"})
        ).status_code == 401
        assert (await service.post(taken, "chat/completions", body)).status_code == 200
        await service.post(taken, "end", {"reward": 0})
        assert (await service.post(taken, "end", {"reward": 1})).status_code == 410
        assert [t.score.total for t in (await running).trajectories] == [0.0]


TOOLS = """{% for tool in tools or [] %}{{ tool | tojson }} <tool_call>{% endfor %}{% for m in messages %}|{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.q }}{% endfor %}{% endfor %}|assistant"""


async def test_tools_reach_the_template_of_a_real_tokenizer(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "models/tiny-policy")
    tokenizer.chat_template = TOOLS
    rendered: list[str] = []

    async def render_chat(messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        rendered.append(tokenizer.decode(render_chat_ids(tokenizer, messages, values).token_ids))
        return RenderedPrompt(service.engine.codec.encode(rendered[-1]))

    monkeypatch.setattr(service.engine, "render_chat", render_chat)
    running = asyncio.create_task(service.backend.run_group(build_question(samples=1)))
    taken = await service.take()
    function = {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "the query"}'}}
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "tool_calls": [call]}]
    body = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    reply = await service.post(taken, "chat/completions", body)
    assert reply.status_code == 200, reply.text
    assert '"name": "search"' in rendered[-1]
    assert rendered[-1].endswith("|user\nWho?|assistant\nthe query|assistant")
    await service.post(taken, "end", {"reward": 1})
    assert [t.status for t in (await running).trajectories] == [Status.STATUS_OK]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"purpose": Purpose.PURPOSE_ASK}, "answers no user's questions"),
        ({"messages": [], "token_ids": [87]}, "an agent outside needs messages"),
    ],
)
async def test_a_prompt_that_no_worker_could_run_is_refused(
    service: Service, fields: dict[str, Any], sentence: str
) -> None:
    (trajectory,) = (await service.backend.run_group(build_question(samples=1, **fields))).trajectories
    assert trajectory.status == Status.STATUS_INVALID_INPUT
    assert sentence in trajectory.status_detail


async def test_an_agent_that_leaves_ends_its_request_and_not_its_session(service: Service) -> None:
    service.engine.gate.clear()
    running = asyncio.create_task(service.backend.run_group(build_question(samples=1)))
    taken = await service.take()
    body = {"messages": [{"role": "user", "content": "Who?"}]}
    asking = asyncio.create_task(service.post(taken, "chat/completions", body))
    await wait_until_async(lambda: len(service.engine.asked) == 1)
    asking.cancel()
    await wait_until_async(lambda: service.engine.cancelled == 1)
    service.engine.gate.set()
    assert (await service.post(taken, "chat/completions", body)).status_code == 200
    await service.post(taken, "end", {"reward": 1})
    (trajectory,) = (await running).trajectories
    assert (trajectory.status, len(trajectory.turns)) == (Status.STATUS_OK, 1)


async def test_hostile_sessions_are_refused_and_the_others_go_on(service: Service) -> None:
    group = asyncio.create_task(service.backend.run_group(build_question(samples=40)))
    taken = [await service.take() for _ in range(40)]
    body = {"messages": [{"role": "user", "content": "Who?"}]}
    huge = {"messages": [{"role": "user", "content": "x" * 5 * 2**20}]}
    long = {"messages": [{"role": "user", "content": "x" * 10**5}]}

    async def attack(number: int) -> list[int]:
        own, other = taken[number], taken[(number + 1) % 40]
        asked = [
            service.post(own, "chat/completions", body, key=other["key"]),
            service.post(own, "end", {"reward": 9}, key=other["key"]),
            service.post(own, "chat/completions", huge),
            service.post(own, "chat/completions", long),
            service.post(own, "end", {"reward": "9"}),
            service.post({**own, "base_url": f"{own['base_url']}/../{other['id']}"}, "keep", {}),
            service.post(own, "chat/completions", body),
        ]
        return [(await one).status_code for one in asked]

    statuses = await asyncio.gather(*(attack(number) for number in range(40)))
    assert {tuple(one) for one in statuses} == {(401, 401, 413, 400, 400, 401, 200)}
    ended = await asyncio.gather(*(service.post(one, "end", {"reward": 1}) for one in taken for _ in range(2)))
    assert sorted(reply.status_code for reply in ended) == [200] * 40 + [410] * 40
    trajectories = (await group).trajectories
    assert [(t.status, t.score.total, len(t.turns)) for t in trajectories] == [(Status.STATUS_OK, 1.0, 1)] * 40


async def test_a_group_that_fails_closes_all_its_sessions_and_their_workers_learn_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.engine.gate.clear()
    running = asyncio.create_task(service.backend.run_group(build_question(samples=3)))
    failing, asking = await service.take(), await service.take()
    body = {"messages": [{"role": "user", "content": "Who?"}]}
    asked = asyncio.create_task(service.post(asking, "chat/completions", body))
    await wait_until_async(lambda: len(service.engine.asked) == 1)

    async def fail(request: GenerationRequest) -> Generation:
        raise RuntimeError("the engine is gone")

    monkeypatch.setattr(service.engine, "generate", fail)
    assert (await service.post(failing, "chat/completions", body)).status_code == 503
    with pytest.raises(ExceptionGroup) as failed:
        await running
    assert [str(error) for error in failed.value.exceptions] == ["the engine is gone"]
    assert (await asked).status_code == 410
    assert service.engine.cancelled == 1
    for taken in (failing, asking):
        assert [(await service.post(taken, verb, {})).status_code for verb in ("keep", "end")] == [410, 410]
    assert (await service.http.post("/v1/sessions/next", json={})).status_code == 204, "nobody gets the third"


async def test_a_worker_that_falls_silent_is_replaced_and_its_tokens_are_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "SILENCE_S", 0.3)
    running = asyncio.create_task(service.backend.run_group(build_question(samples=1)))
    first = await service.take()
    body = {"messages": [{"role": "user", "content": "Who?"}]}
    await service.post(first, "chat/completions", body)
    second = await service.take()
    assert (second["task"], second["key"] == first["key"]) == (first["task"], False)
    assert (await service.post(first, "chat/completions", body)).status_code == 410
    await service.post(second, "chat/completions", body)
    await service.post(second, "end", {"reward": 2.0})
    (trajectory,) = (await running).trajectories
    assert (trajectory.score.total, len(trajectory.turns), sum(trajectory.loss_mask)) == (2.0, 1, 7)
    assert (service.counts.sessions_repeated, service.counts.session_tokens_lost) == (1, 7)


SLOW_AGENT = """
import asyncio
from pathlib import Path

async def run(task, client):
    await client.chat([{"role": "user", "content": "Who?"}])
    Path("begun").touch()
    await asyncio.sleep(0 if Path("quick").exists() else 600)
    return 1.0
"""


async def test_what_a_killed_worker_had_is_run_again_and_is_on_the_stream_once(
    service: Service, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "SILENCE_S", 3.0)
    (tmp_path / "agent.py").write_text(SLOW_AGENT)
    command = [sys.executable, "-m", "forage_rollout.command", "agent.py", "--parallel", "3"]
    command.append(f"rollout.http_address={service.url.removeprefix('http://')}")
    paths = os.pathsep.join(path for path in sys.path if path)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})

    prompts = [
        build_prompt(n, messages=[ChatMessage(role="user", content="Who?")], data_source="s", environment="external")
        for n in range(4)
    ]
    for prompt in prompts:
        bench.trainer.issue(prompt)
    async with bench.run(service.backend.run_group) as dispatcher:
        worker = start()
        await wait_until_async(lambda: len(service.engine.asked) == 3)
        worker.send_signal(signal.SIGKILL)
        await asyncio.to_thread(worker.wait)
        (tmp_path / "quick").touch()
        worker = start()
        try:
            groups = await bench.take_groups(4)
        finally:
            worker.kill()
            await asyncio.to_thread(worker.wait)
        assert await bench.take_groups(1, timeout_s=0.3) == []
    assert sorted(group.group_uid for group in groups) == [prompt.group_uid for prompt in prompts]
    assert [len(group.trajectories) for group in groups] == [2] * 4
    assert all(t.status == Status.STATUS_OK and t.score.total == 1.0 for g in groups for t in g.trajectories)
    assert service.counts.sessions_repeated == 3
    assert len(service.engine.asked) == 4 * 2 + 3
    assert dispatcher.counts.runs_repeated == dispatcher.counts.groups_duplicated == 0
