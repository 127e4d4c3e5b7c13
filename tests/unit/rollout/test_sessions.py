"""Sessions: what a worker may send, and that what is recorded is what was sampled, whatever it sends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_proto.v1.trajectory_pb2 import ChatMessage, GroundTruth, Prompt, Role, Trajectory
from forage_rollout.environments.environment import Episode
from forage_rollout.environments.external import External
from forage_rollout.loop.generation import Generation, RenderedPrompt
from forage_rollout.loop.tokens import FileTokenizer
from forage_rollout.loop.trajectory_builder import Limits, TrajectoryBuilder
from forage_rollout.sessions.requests import ChatRequest, Ending, SessionError, read_chat, read_ending, write_chat
from forage_rollout.sessions.session import MOST_PARALLEL, SILENCE_S, Session, WorkerLostError
from forage_rollout.sessions.table import SessionTable
from forage_runtime.settings import RolloutSettings
from forage_runtime.text.chat_template import Chat

FOLDER = Path(__file__).resolve().parents[3] / "models/tiny-policy"
TINY = FileTokenizer(FOLDER)
END = TINY.encode("<|im_end|>")[0]
OWN = (FOLDER / "chat_template.jinja").read_text()
TEMPLATES = {
    "own": OWN,
    "strips": OWN.replace("message['content']", "message['content'].strip()"),
    "drops_thoughts": OWN.replace("message['content']", "message['content'].split('</think>')[-1]"),
    "opens_a_thought": OWN.replace("assistant\n'", "assistant\n<think>\n'"),
}
# As Qwen's: tools in the system's turn, calls as JSON in tags, their results in the user's turn.
TEMPLATES["tools"] = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMPILED = {name: jinja2.Template(text, keep_trailing_newline=True) for name, text in TEMPLATES.items()}
MARKS = [TINY.encode(text) for text in ("</think>", "<think>", " ", "\n", "é", "<answer>a</answer>", "Obs:")]
SAMPLED = st.lists(st.one_of(st.integers(4, TINY.vocabulary_size - 1).map(lambda id: [id]), st.sampled_from(MARKS)))
REPLIES = st.tuples(SAMPLED.map(lambda parts: [id for part in parts for id in part][:24]), st.booleans())


@dataclass
class Bench:
    """A session whose engine replies with given texts, and notes the context of each."""

    template: str = "own"
    limits: Limits = field(default_factory=lambda: Limits(64, 2000, 200, 100))
    most_requests: int = 64
    replies: list[list[int]] = field(default_factory=list)
    sampled: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, table: SessionTable | None = None) -> Session:
        messages = [ChatMessage(role="user", content="Who?")]
        prompt = Prompt(group_uid="g", data_source="s", messages=messages, ground_truth=GroundTruth(targets=["me"]))
        environment = External(RolloutSettings(), None)
        self.gate.set()
        self.builder = TrajectoryBuilder.start(
            self.limits, TINY, RenderedPrompt(TINY.encode("Who?")), environment, Episode(prompt, 1)
        )
        table = table or SessionTable("replica")
        return table.open(self.builder, self.render, self.generate, self.most_requests)

    async def render(self, chat: Chat, tools: tuple[dict[str, Any], ...]) -> RenderedPrompt:
        text = COMPILED[self.template].render(messages=chat, tools=tools, add_generation_prompt=True)
        return RenderedPrompt(TINY.encode(text), "<think>\n" if self.template == "opens_a_thought" else "")

    async def generate(self, context: list[int], length: int, stop: tuple[str, ...], number: int) -> Generation:
        await self.gate.wait()
        ids = (self.replies.pop(0) if self.replies else [*TINY.encode("yes"), END])[:length] or [END]
        log_probs = [-(number + index / 64) for index in range(len(ids))]
        self.sampled.append((context, ids, log_probs))
        middle = len(ids) // 2
        versions = [(number, 1, 0, middle), (number + 1, 1, middle, len(ids))]
        return Generation(ids, log_probs, len(ids) == length and ids[-1] != END, versions)

    def check(self, stops: Sequence[str] = ()) -> Trajectory:
        """Check that exactly what was sampled is trained on, each token behind the context that it was sampled from."""
        done = self.builder.build()
        response = list(done.token_ids[done.prompt_length :])
        assert len(done.turns) == len(self.sampled)
        own = [span for span in done.spans if span.role == Role.ROLE_MODEL]
        trained: list[int] = []
        for turn, span, (context, ids, log_probs) in zip(done.turns, own, self.sampled, strict=True):
            kept = ids[: span.end - span.begin]
            assert kept == ids or any(stop in TINY.decode(kept) for stop in stops), "cut at a stop text alone"
            assert list(done.token_ids[turn.context_begin : span.begin]) == context
            assert list(done.token_ids[span.begin : span.end]) == kept
            begin, end = span.begin - done.prompt_length, span.end - done.prompt_length
            assert list(done.turn_ids[begin:end]) == [turn.index] * len(kept)
            assert list(done.logprobs[begin:end]) == pytest.approx(log_probs[: len(kept)])
            trained += range(begin, end)
        assert [index for index, mask in enumerate(done.loss_mask) if mask] == trained
        assert len(done.loss_mask) == len(response) == len(done.turn_ids) == len(done.logprobs)
        covered = [index for segment in done.segments for index in range(segment.begin, segment.end)]
        assert covered == trained
        assert [(span.begin, span.end) for span in done.spans] == list(
            zip([0, *(s.end for s in done.spans[:-1])], [s.end for s in done.spans], strict=True)
        )
        return done


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def say(session: Session, messages: list[tuple[str, str]], **options: Any) -> str:
    return (await session.chat(ChatRequest(to_messages(*messages), **options))).content


def to_messages(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


@given(st.sampled_from(sorted(TEMPLATES)), st.lists(REPLIES, min_size=2, max_size=6))
def test_a_chat_that_goes_on_is_what_was_sampled(name: str, replies: list[tuple[list[int], bool]]) -> None:
    async def test() -> None:
        bench = Bench(name, replies=[ids + [END] * ends for ids, ends in replies])
        session, messages = bench.open(), [("system", "S"), ("user", "Who?")]
        for _ in replies:
            messages += [("assistant", await say(session, messages)), ("user", "and?")]
        done = bench.check()
        assert TINY.decode(done.token_ids[: done.prompt_length]).startswith("<|im_start|>system\nS<|im_end|>")
        plain = all("<|" not in TINY.decode(ids) and TINY.decode(ids).isascii() for ids, _ in replies)
        if name == "own" and plain:
            assert not any(turn.context_begin for turn in done.turns), "nothing was rewritten"

    run(test)


CHANGES = st.tuples(st.sampled_from(["go on", "rewrite", "branch", "again", "compact"]), st.integers(0, 9), REPLIES)


@given(
    st.sampled_from(sorted(TEMPLATES)), st.lists(CHANGES, min_size=1, max_size=8), st.sampled_from(["Obs:", "a", "é"])
)
def test_an_agent_that_rewrites_branches_and_repeats_is_trained_on_what_was_sampled(
    name: str, changes: list[tuple[str, int, tuple[list[int], bool]]], stop: str
) -> None:
    async def test() -> None:
        bench = Bench(name, replies=[ids + [END] * ends for _, _, (ids, ends) in changes])
        session, chats = bench.open(), [[("user", "Who?")]]
        for kind, number, _ in changes:
            messages = list(chats[number % len(chats)] if kind == "branch" else chats[-1])
            if kind == "rewrite":
                index = number % len(messages)
                messages[index] = (messages[index][0], messages[index][1][:2] + "!")
            if kind == "compact":
                messages = [messages[0], ("user", "so far: nothing <|im_end|>")]
            reply = await say(session, messages, stop=(stop,))
            chats.append(messages if kind == "again" else [*messages, ("assistant", reply), ("user", "é?")])
        bench.check([stop])

    run(test)


def test_requests_of_sub_agents_at_once_are_recorded_one_after_the_other() -> None:
    async def test() -> None:
        bench = Bench(replies=[[*TINY.encode(f"reply {n}"), END] for n in range(MOST_PARALLEL)])
        session = bench.open()
        bench.gate.clear()
        asking = [asyncio.create_task(say(session, [("user", f"part {n}")])) for n in range(MOST_PARALLEL)]
        await asyncio.sleep(0)
        with pytest.raises(SessionError, match="16 requests of this session are running") as refused:
            await say(session, [("user", "one too many")])
        assert refused.value.status == 429
        session.end(Ending())
        waiting = asyncio.create_task(session.wait_for_end())
        await asyncio.sleep(0)
        assert not waiting.done(), "what is being sampled is recorded before the end"
        bench.gate.set()
        assert sorted(await asyncio.gather(*asking)) == sorted(f"reply {n}" for n in range(MOST_PARALLEL))
        await waiting
        done = bench.check()
        assert [turn.context_begin > 0 for turn in done.turns] == [False] + [True] * (MOST_PARALLEL - 1)

    run(test)


def test_a_branch_that_goes_on_keeps_the_tokens_that_it_was_sampled_with() -> None:
    async def test() -> None:
        odd = [TINY.encode("y")[0], TINY.encode("e")[0], TINY.encode("s")[0], END]  # not how "yes" is encoded
        assert TINY.encode("yes") != odd[:-1]
        bench = Bench(replies=[odd, [*TINY.encode("no"), END], [*TINY.encode("so"), END]])
        session, first = bench.open(), [("user", "Who?")]
        reply = await say(session, first)
        await say(session, [("user", "a sub-agent's question")])
        await say(session, [*first, ("assistant", reply), ("user", "and?")])
        done = bench.check()
        contexts = [context for context, _, _ in bench.sampled]
        assert contexts[2][: len(contexts[0]) + 4] == [*contexts[0], *odd]
        assert [turn.context_begin > 0 for turn in done.turns] == [False, True, True]

    run(test)


def test_a_reply_says_how_it_ended_and_a_stop_text_is_not_in_it() -> None:
    async def test() -> None:
        bench = Bench(replies=[[*TINY.encode("Act\nObs: this"), END], TINY.encode("a long reply without an end")])
        session = bench.open()
        one = await session.chat(ChatRequest(to_messages(("user", "Who?")), stop=("Obs:",)))
        two = await session.chat(ChatRequest(to_messages(("user", "Who?")), max_tokens=4))
        assert (one.content, one.finish_reason) == ("Act\n", "stop")
        assert (two.finish_reason, two.completion_tokens) == ("length", 4)
        bench.check(["Obs:"])

    run(test)


SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {"name": "search", "description": "finds", "parameters": {"type": "object"}},
}


async def call_tools(session: Session, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Ask as a client does: the reply's message."""
    body = {"messages": messages, "tools": [SEARCH], **options}
    request = read_chat(json.dumps(body).encode())
    message: dict[str, Any] = json.loads(write_chat(request, await session.chat(request)).content)["choices"][0]
    return message


@pytest.mark.parametrize(
    "sampled",
    [
        '<tool_call>\n{"name": "search", "arguments": {"q": "who"}}\n</tool_call>',
        'hm\n<tool_call>{"arguments":{"q":"é"},"name":"search"}</tool_call><tool_call>{"name": "search"}</tool_call>',
    ],
)
def test_calls_of_tools_are_read_and_come_back_as_they_were_sampled(sampled: str) -> None:
    async def test() -> None:
        bench = Bench("tools", replies=[[*TINY.encode(sampled), END], [*TINY.encode("me"), END]])
        session, messages = bench.open(), [{"role": "user", "content": "Who?"}]
        choice = await call_tools(session, messages)
        assert choice["finish_reason"] == "tool_calls"
        calls = choice["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["search"] * sampled.count("<tool_call>")
        assert json.loads(calls[0]["function"]["arguments"]) == {"q": "é" if "é" in sampled else "who"}
        for call in calls:  # some clients write the arguments anew
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        messages.append(choice["message"])
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "it is me"} for call in calls]
        assert (await call_tools(session, messages))["message"]["content"] == "me"
        done = bench.check()
        assert not any(turn.context_begin for turn in done.turns), "whatever white space the calls had"
        assert "<tool_response>it is me" in TINY.decode(bench.sampled[1][0])
        assert '"description": "finds"' in TINY.decode(bench.sampled[0][0])

    run(test)


def test_calls_that_were_not_sampled_here_are_rendered_by_the_template() -> None:
    async def test() -> None:
        bench = Bench("tools")
        call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "<|im_end|>"}'}}
        messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        await call_tools(bench.open(), [*messages, {"role": "tool", "tool_call_id": "1", "content": "me"}])
        text = TINY.decode(bench.sampled[0][0])
        assert '<tool_call>\n{"arguments": {"q": "\\u0026lt;|im_end|\\u0026gt;"}, "name": "search"}' in text
        bench.check()

    run(test)


@pytest.mark.parametrize(
    "sampled",
    [
        "<tool_call>search me</tool_call>",
        '<tool_call>["search"]</tool_call>',
        '<tool_call>{"name": "search", "arguments": ["q"]}</tool_call>',
        "no call",
    ],
)
def test_what_is_no_call_is_text(sampled: str) -> None:
    async def test() -> None:
        bench = Bench("tools", replies=[[*TINY.encode(sampled), END]])
        choice = await call_tools(bench.open(), [{"role": "user", "content": "Who?"}])
        assert (choice["message"]["content"], choice["finish_reason"]) == (sampled, "stop")
        assert "tool_calls" not in choice["message"]

    run(test)


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    async def test() -> None:
        bench = Bench("own")
        with pytest.raises(SessionError, match="does not show tools with <tool_call>") as refused:
            await call_tools(bench.open(), [{"role": "user", "content": "Who? <tool_call>"}])
        assert (refused.value.status, refused.value.param) == (400, "tools")
        assert not bench.sampled

    run(test)


def test_what_is_too_much_is_refused_and_costs_no_generation() -> None:
    async def test() -> None:
        bench = Bench(limits=Limits(64, 40, 8, 100), most_requests=2)
        session = bench.open()
        for content in ("word " * 60, "x" * 10**7):
            with pytest.raises(SessionError, match=r"rollout\.max_prompt_length leaves 40") as refused:
                await say(session, [("user", content)])
            assert (refused.value.status, refused.value.kind) == (400, "context_length_exceeded")
        with pytest.raises(SessionError, match="the session has had 2 requests"):
            await say(session, [("user", "Who?")])
        assert not bench.sampled

    run(test)


@pytest.mark.parametrize("field", ["role", "name", "tool_call_id"])
def test_whatever_of_a_message_is_too_long_is_refused_before_it_is_encoded(field: str) -> None:
    async def test() -> None:
        bench = Bench(limits=Limits(64, 40, 8, 100))
        message = {"role": "user", "content": "Who?"} | {field: "x" * 10**7}
        with pytest.raises(SessionError, match="the messages make more tokens"):
            await bench.open().chat(ChatRequest([message]))

    run(test)


def test_requests_at_once_have_contexts_of_their_own() -> None:
    """Else the span of one would be the parent of another's."""

    async def test() -> None:
        bench, own, read = Bench(), contextvars.ContextVar("own", default=0), []
        session = bench.open()

        async def generate(context: list[int], length: int, stop: tuple[str, ...], number: int) -> Generation:
            own.set(number)
            await asyncio.sleep(0)
            read.append((number, own.get()))
            return await bench.generate(context, length, stop, number)

        session._generate = generate
        await asyncio.gather(*(say(session, [("user", "Who?")]) for _ in range(3)))
        assert read == [(1, 1), (2, 2), (3, 3)]

    run(test)


def test_after_its_end_nothing_is_recorded() -> None:
    async def test() -> None:
        bench = Bench()
        session = bench.open()
        await say(session, [("user", "Who?")])
        session.end(Ending(1.0))
        for late in (lambda: session.end(Ending(2.0)), session.hear):
            with pytest.raises(SessionError, match="this session is over"):
                late()
        with pytest.raises(SessionError, match="this session is over"):
            await say(session, [("user", "more")])
        assert (await session.wait_for_end()).reward == 1.0
        assert len(bench.check().turns) == 1

    run(test)


def test_what_is_sampled_for_a_session_that_was_closed_is_given_up() -> None:
    async def test() -> None:
        bench = Bench()
        table = SessionTable("replica")
        session = bench.open(table)
        bench.gate.clear()
        asking = asyncio.create_task(say(session, [("user", "Who?")]))
        await asyncio.sleep(0)
        table.close(session)
        with pytest.raises(SessionError, match="this session is over") as refused:
            await asking
        assert refused.value.status == 410
        assert not bench.builder.turns

    run(test)


def test_an_engine_that_fails_ends_the_sample_with_its_error() -> None:
    async def test() -> None:
        bench = Bench()
        session = bench.open()

        async def fail(*_: Any) -> Generation:
            raise RuntimeError("the engine is gone")

        session._generate = fail
        with pytest.raises(SessionError, match="the engine is gone") as refused:
            await say(session, [("user", "Who?")])
        assert refused.value.status == 503
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await session.wait_for_end()

    run(test)


async def test_a_silent_worker_counts_as_gone_but_not_while_its_reply_is_sampled(loop_clock: Any) -> None:
    bench = Bench()
    session = bench.open()
    bench.gate.clear()
    asking = asyncio.create_task(say(session, [("user", "Who?")]))
    waiting = asyncio.create_task(session.wait_for_end())
    for turn in range(24):
        loop_clock.skip(SILENCE_S if turn % 8 == 0 else 0.0)
        await asyncio.sleep(0)
    assert not waiting.done()
    bench.gate.set()
    await asking
    loop_clock.skip(SILENCE_S)
    with pytest.raises(WorkerLostError):
        await waiting


def test_a_session_is_for_its_worker_alone() -> None:
    async def ask(table: SessionTable, taken: dict[str, Any], verb: str, body: Any, key: str = "") -> tuple[int, Any]:
        reply = await table.answer(taken["id"], key or taken["key"], verb, json.dumps(body).encode())
        return reply.status, json.loads(reply.content)

    async def test() -> None:
        table, benches = SessionTable("replica"), [Bench(), Bench()]
        sessions = [bench.open(table) for bench in benches]
        unknown = {"id": sessions[0].id, "key": sessions[0].key}
        assert (await ask(table, unknown, "keep", {}))[0] == 410, "nobody has taken it"
        one, two = table.take(), table.take()
        assert one is not None
        assert two is not None
        assert table.take() is None
        assert table.waiting == 0
        assert one["task"] == {
            "id": "g/1",
            "data_source": "s",
            "messages": [{"role": "user", "content": "Who?"}],
            "targets": ["me"],
        }
        chat = {"messages": [{"role": "user", "content": "Who?"}]}
        status, refusal = await ask(table, one, "chat/completions", chat, key=two["key"])
        assert (status, refusal["error"]["type"]) == (401, "unauthenticated")
        assert not benches[0].sampled
        status, reply = await ask(table, one, "chat/completions", chat)
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "yes")
        parameters: dict[str, Any] = {}
        for _ in range(900):
            parameters = {"items": parameters}
        tool = {"type": "function", "function": {"name": "deep", "parameters": parameters}}
        assert (await ask(table, one, "chat/completions", chat | {"tools": [tool]}))[0] == 400
        assert (await ask(table, one, "keep", {}))[0] == 200
        assert (await ask(table, one, "end", {"reward": 0.5}))[0] == 200
        assert (await ask(table, one, "end", {"reward": 1}))[0] == 410
        assert (await sessions[0].wait_for_end()).reward == 0.5
        table.close(sessions[0])
        assert (await ask(table, one, "chat/completions", chat))[0] == 410
        assert (await ask(table, {**two, "id": "elsewhere.1"}, "keep", {}))[0] == 410

    run(test)


CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
NO_JSON = {"name": "search", "arguments": "x"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Who?"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": NO_JSON}]}]}, "messages[0].tool_calls"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": "search"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 65}, "stop"),
    ],
)
def test_what_sessions_do_not_support_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    known = {"messages": [{"role": "user", "content": "Who?"}]} if "messages" not in body and body else {}
    with pytest.raises(SessionError) as refused:
        read_chat(json.dumps(known | body).encode())
    assert (refused.value.status, refused.value.param) == (400, param)


def test_what_openai_clients_send_is_read() -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?\ud800"}]
    body = {
        "model": "any",
        "messages": [{"role": "system", "content": None}, {"role": "user", "name": "x", "content": parts}],
        "n": 1,
        "temperature": 0.2,
        "tools": None,
        "max_completion_tokens": None,
        "max_tokens": 5,
        "stop": "x",
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
        "user": "me",
    }
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "Who??", "name": "x"}]
    expected = ChatRequest(messages, 5, ("x",), (), "any", True, True)
    assert read_chat(json.dumps(body).encode()) == expected


NAMES = ("messages", "role", "content", "type", "text", "tool_calls", "function", "name", "arguments")
FIELDS = st.sampled_from([*NAMES, "tools", "stop", "max_tokens", "n", "reward", "error"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["function", "{}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(FIELDS, VALUES, max_size=5), st.lists(st.dictionaries(FIELDS, VALUES, max_size=4), max_size=3))
def test_whatever_a_body_holds_is_read_or_refused(body: dict[str, Any], messages: list[Any]) -> None:
    for given_body in (body, body | {"messages": messages}):
        for read in (read_chat, read_ending):
            with contextlib.suppress(SessionError):
                found = read(json.dumps(given_body).encode())
                json.dumps(found.messages if isinstance(found, ChatRequest) else found.error).encode()


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    for read in (read_chat, read_ending):
        with pytest.raises(SessionError, match="the body is not"):
            read(body)


@pytest.mark.parametrize("reward", ["1", True, float("nan"), float("inf"), 10**7, 10**400, []])
def test_a_reward_is_a_number_or_nothing(reward: Any) -> None:
    with pytest.raises(SessionError, match="reward is"):
        read_ending(json.dumps({"reward": reward}).encode())
    assert read_ending(b"") == read_ending(b'{"reward": null}') == Ending()
    assert read_ending(b'{"reward": 1, "error": ""}') == Ending(1.0)
