"""One session: what a worker may do in it, and the trajectory that comes of it.

A generation is recorded as the engine gave it: token ids, log-probabilities, versions. The next request's messages are
rendered, and keep the tokens of earlier replies where their text is the same (`chats.memory`). What the agent or the
chat template rewrote is another context, which the trajectory builder puts behind what was sampled before.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from forage_proto.v1.trajectory_pb2 import ActionKind, Prompt
from forage_rollout.chats.memory import ChatMemory
from forage_rollout.environments.environment import Action
from forage_rollout.loop.generation import Generation, RenderedPrompt
from forage_rollout.loop.tokens import escape_message
from forage_rollout.loop.trajectory_builder import TrajectoryBuilder
from forage_rollout.sessions.requests import ChatRequest, Ending, Message, Reply, SessionError
from forage_rollout.sessions.tools import OPENING, name_calls, shows_tools, split_calls
from forage_runtime.text.chat_template import Chat

SILENCE_S = 20.0
"""A worker that sends nothing for so long, and for which nothing is being sampled, counts as gone."""
MOST_PARALLEL = 16
"""Requests of a session at once."""
MOST_TOKENS = 2**20
"""Of a trajectory, with all its contexts: at most so many go to the stream."""
_REMEMBERED_CONTEXTS = 8
"""Replies are remembered with their contexts, up to the length of so many of the longest ones."""
REPLY = Action(ActionKind.ACTION_KIND_SEARCH, "", "reply")
"""The action of a generation that is not the last, as of any environment's: what it asks for is the agent's matter."""

Generate = Callable[[list[int], int, tuple[str, ...], int], Awaitable[Generation]]
"""Samples: context, most tokens, stop texts, number of the generation from 1."""
Render = Callable[[Chat, tuple[dict[str, Any], ...]], Awaitable[RenderedPrompt]]
"""Renders a chat, and the tools that it may use."""


class WorkerLostError(Exception):
    """The worker of a session is silent: it has died, or does not reach the service."""


class Session:
    """One attempt at a sample.

    Attributes:
        id: begins with the name of the replica that has it.
        key: what its worker must send.
        taken: set once a worker has it.
        is_over: nothing is recorded any more.

    Args:
        most_requests: generations that it may have.
    """

    def __init__(
        self, id: str, builder: TrajectoryBuilder, render: Render, generate: Generate, most_requests: int
    ) -> None:
        self.id = id
        self.key = secrets.token_urlsafe(32)
        self.taken = asyncio.Event()
        self.is_over = False
        self._builder = builder
        self._render = render
        self._generate = generate
        self._most_requests = most_requests
        longest = builder.limits.max_context_length
        response = builder.limits.max_response_length
        self._memory = ChatMemory(builder.codec, longest, _REMEMBERED_CONTEXTS * (longest + response))
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._begun = 0
        self._running: set[asyncio.Task[Reply]] = set()
        self._escaped: dict[str, str] = {}  # texts of the latest chat, most of which come again
        self._with_calls: dict[str, str] = {}  # replies with tool calls: their texts by what the client got
        self._context = contextvars.copy_context()  # of the sample: generations belong to its span
        self._ended: asyncio.Future[Ending] = self._loop.create_future()

    def describe_task(self) -> dict[str, Any]:
        """What the worker's agent gets to know; accepted answers too, since it may give the reward itself."""
        prompt: Prompt = self._builder.episode.prompt
        return {
            "id": f"{prompt.group_uid}/{self._builder.episode.sample}",
            "data_source": prompt.data_source,
            "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
            "targets": list(prompt.ground_truth.targets),
        }

    def accepts(self, key: str) -> bool:
        """Whether this is its key; compares in constant time."""
        return hmac.compare_digest(key.encode(), self.key.encode())

    def hear(self) -> None:
        """Note a sign of life of the worker.

        Raises:
            SessionError: the session is over.
        """
        if self.is_over or self._ended.done():
            raise _over()
        self._heard_at = self._loop.time()

    def end(self, ending: Ending) -> None:
        """End it; requests that are still running are recorded before. Raises as `hear`."""
        self.hear()
        self._ended.set_result(ending)

    async def wait_for_end(self) -> Ending:
        """Return once the worker has ended it.

        Raises:
            WorkerLostError: the worker fell silent.
            Exception: whatever the engine raised.
        """
        while not self._ended.done():
            silent_s = 0.0 if self._running else self._loop.time() - self._heard_at
            if silent_s >= SILENCE_S:
                raise WorkerLostError
            await asyncio.wait({self._ended}, timeout=SILENCE_S - silent_s)  # wait: named by the agent
        while self._running:
            await asyncio.wait(self._running)  # wait: has the time limit of the trajectory
        return self._ended.result()

    def close(self) -> None:
        """Record nothing from now on; running requests are given up."""
        self.is_over = True
        for task in self._running:
            task.cancel()
        if self._ended.done():
            self._ended.exception()  # it is reported elsewhere, or too late
        else:
            self._ended.cancel()

    async def chat(self, request: ChatRequest) -> Reply:
        """Sample the reply to a chat, and record it.

        Raises:
            SessionError: it is refused, or the engine failed.
        """
        self.hear()
        if len(self._running) >= MOST_PARALLEL:
            raise SessionError(429, f"{MOST_PARALLEL} requests of this session are running: wait for one of them")
        if self._begun >= self._most_requests:
            raise SessionError(400, f"the session has had {self._begun} requests, params.max_requests: end it")
        self._begun += 1
        task = asyncio.create_task(self._answer(request, self._begun), context=self._context.copy())
        self._running.add(task)
        task.add_done_callback(self._forget)
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_over:
                raise _over() from None
            raise

    def _forget(self, task: asyncio.Task[Reply]) -> None:
        self._running.discard(task)
        self._heard_at = self._loop.time()

    def _read(self, request: ChatRequest) -> tuple[Chat, tuple[dict[str, Any], ...]]:
        """The chat and the tools as the template gets them: without control tokens, calls of replies as sampled.

        Raises:
            SessionError: they are too long, or hold a control token where none can be left out.
        """
        codec, limit = self._builder.codec, self._builder.limits.max_context_length
        messages = [self._restore(message) for message in request.messages]
        size = sum(len(str(value)) for message in messages for value in message.values())
        # No more characters can fit, and encoding megabytes takes seconds.
        if size + len(str(request.tools)) > limit * codec.max_token_chars:
            raise _too_long("more", limit)
        texts = {message[field] for message in messages for field in ("role", "content")}
        self._escaped = {text: self._escaped.get(text) or escape_message(codec, text) for text in texts}
        chat = [
            self._escape_rest(message) | {field: self._escaped[message[field]] for field in ("role", "content")}
            for message in messages
        ]
        return chat, tuple(self._escape_rest({"tools": request.tools})["tools"]) if request.tools else ()

    async def _answer(self, request: ChatRequest, number: int) -> Reply:
        codec, limits = self._builder.codec, self._builder.limits
        chat, tools = self._read(request)
        try:
            rendered = await self._render(chat, tools)
        except ValueError as error:
            raise SessionError(400, f"the chat template rejects the messages: {error}", "messages") from None
        if tools and not shows_tools(codec.decode(rendered.token_ids), tools):
            raise SessionError(400, f"the policy's chat template does not show tools with {OPENING}", "tools")
        recalled = self._memory.recall(chat, rendered.token_ids)
        context = rendered.token_ids if recalled is None else recalled.token_ids
        if len(context) > limits.max_context_length:
            raise _too_long(str(len(context)), limits.max_context_length)
        if len(self._builder.token_ids) + len(context) + limits.max_response_length > MOST_TOKENS:
            raise SessionError(400, f"the session has {len(self._builder.token_ids)} tokens with its contexts: end it")
        length = min(request.max_tokens or limits.max_response_length, limits.max_response_length)
        try:
            generation = await self._generate(context, length, request.stop, number)
        except Exception as error:
            # The sample ends as if its own loop had asked: with a status, or with the group, which runs again.
            if not self._ended.done():
                self._ended.set_exception(error)
            raise SessionError(503, f"the engine failed: {error}") from error
        return self._record(request, chat, RenderedPrompt(context, rendered.opening), generation)

    def _record(self, request: ChatRequest, chat: Chat, context: RenderedPrompt, generation: Generation) -> Reply:
        """Record a generation; nothing else runs meanwhile."""
        builder = self._builder
        builder.set_context(*context)
        builder.add_generation(generation, request.stop)
        builder.add_action(REPLY)
        sampled, text = builder.last_generation
        content = next((text.removesuffix(stop) for stop in request.stop if text.endswith(stop)), text)
        self._memory.remember(chat, context.token_ids, sampled, escape_message(builder.codec, content))
        reason = "length" if builder.episode.hit_length else "stop"
        calls: list[dict[str, Any]] = []
        if request.tools:
            whole = content
            content, calls = split_calls(whole)
        if calls:
            self._with_calls[name_calls(content, calls)] = whole
            reason = "tool_calls"
        return Reply(content, reason, len(context.token_ids), len(sampled), tuple(calls))

    def _restore(self, message: Message) -> Message:
        """A message in which the tool calls of a reply are the text again that was sampled, if it was here.

        Others are rendered by the template, which reads their arguments as an object.
        """
        calls = message.get("tool_calls")
        if not calls:
            return message
        text = self._with_calls.get(name_calls(message["content"], calls))
        if text is not None:
            return {"role": message["role"], "content": text}
        functions = [call["function"] for call in calls]
        read = [{"name": one["name"], "arguments": json.loads(one["arguments"] or "{}")} for one in functions]
        return message | {"tool_calls": [{"type": "function", "function": function} for function in read]}

    def _escape_rest(self, fields: Message) -> Message:
        """What a message has besides role and content, or a request besides messages, without control tokens."""
        rest = {name: value for name, value in fields.items() if name not in ("role", "content")}
        if not rest:
            return {}
        try:
            escaped: Message = json.loads(escape_message(self._builder.codec, json.dumps(rest, ensure_ascii=False)))
        except ValueError:
            raise SessionError(400, "tools or tool calls hold a control token of the policy: leave it out") from None
        return escaped


def _over() -> SessionError:
    return SessionError(410, "this session is over: take another one", kind="session_over")


def _too_long(given: str, limit: int) -> SessionError:
    sentence = f"the messages make {given} tokens, and rollout.max_prompt_length leaves {limit}: shorten them"
    return SessionError(400, sentence, "messages", "context_length_exceeded")
