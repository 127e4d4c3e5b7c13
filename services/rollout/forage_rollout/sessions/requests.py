"""Requests and replies of a session in the form of OpenAI's chat completions, and refusals in that of their errors."""

from __future__ import annotations

import json
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

from forage_runtime.errors import ForageError
from forage_runtime.text.characters import replace_halves

GONE = "there is no such session: it has ended, was too slow, or its worker was silent; take another one"
WRONG_KEY = "this is not the key of this session"
MOST_MESSAGES = 4096
_MOST_STOPS = 4
_LONGEST_STOP = 64
LARGEST_REWARD = 1e6
_LONGEST_ERROR = 2000
_LENGTHS = ("max_completion_tokens", "max_tokens")
_TOOL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_JSON = "application/json"
_EVENTS = "text/event-stream"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tool_choice": ("auto",),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
}
"""Parameters that would change what is sampled, or what the reply holds: refused, but for these values and null."""


class SessionError(ForageError):
    """A request of a worker is refused; status: of the HTTP reply."""

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.param, self.kind = status, param, kind


Message = dict[str, Any]


@dataclass(frozen=True)
class ChatRequest:
    """messages: role and content of each, and its tool calls. max_tokens: 0 = as many as the service allows."""

    messages: list[Message]
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    model: str = ""
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True)
class Reply:
    """What a chat request is answered with, before it is JSON; tool_calls: in OpenAI's form."""

    content: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Ending:
    """How a worker ended a session: with a reward or nothing, or with what its agent raised."""

    reward: float | None = None
    error: str = ""


@dataclass(frozen=True)
class HttpReply:
    """A whole reply over HTTP."""

    status: int
    content: bytes
    media_type: str = _JSON


def read_chat(body: bytes) -> ChatRequest:
    """Read the body of a chat completion. The run's own sampling applies, whatever temperature, top_p or seed it has.

    Raises:
        SessionError: it is malformed, or asks for what is not supported; names the parameter.
    """
    given = _read_object(body)
    for name, harmless in _UNSUPPORTED.items():
        value = given.get(name)
        if value is not None and value not in harmless:
            raise SessionError(400, f"{name} is {_show(value)}: sessions do not support it; leave it out", name)
    messages = given.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MOST_MESSAGES:
        raise SessionError(400, f"messages: expected a list of 1 to {MOST_MESSAGES}", "messages")
    most = next((given[name] for name in _LENGTHS if given.get(name) is not None), None)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise SessionError(400, f"max_tokens is {_show(most)}: expected at least 1", "max_tokens")
    options = given.get("stream_options")
    return ChatRequest(
        messages=[_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        max_tokens=most or 0,
        stop=_read_stop(given.get("stop")),
        tools=_read_tools(given.get("tools")),
        model=str(given.get("model") or "")[:200],
        stream=given.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def read_ending(body: bytes) -> Ending:
    """Read the body of an end: `reward`, a number or null, or `error`, a text.

    Raises:
        SessionError: it is malformed.
    """
    given = _read_object(body or b"{}")
    reward, error = given.get("reward"), given.get("error") or ""
    if reward is not None and (not isinstance(reward, int | float) or isinstance(reward, bool)):
        raise SessionError(400, f"reward is {_show(reward)}: expected a number or null", "reward")
    if reward is not None and not abs(reward) <= LARGEST_REWARD:  # NaN, too
        expected = f"{-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
        raise SessionError(400, f"reward is {_show(reward)}: expected {expected}", "reward")
    if not isinstance(error, str):
        raise SessionError(400, f"error is {_show(error)}: expected a text", "error")
    return Ending(None if reward is None else float(reward), cut_error(error))


def cut_error(error: str) -> str:
    """What is sent, and kept, of the text of an error."""
    return replace_halves(error[:_LONGEST_ERROR])


def write_chat(request: ChatRequest, reply: Reply) -> HttpReply:
    """Write a reply; a stream holds all of it in one chunk."""
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model}
    if not request.stream:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.tool_calls:
            message |= {"content": reply.content or None, "tool_calls": list(reply.tool_calls)}
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
        return write_json({**common, "object": "chat.completion", "choices": [choice], "usage": usage})
    common["object"] = "chat.completion.chunk"
    delta: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(reply.tool_calls)]
    chunks: list[dict[str, Any]] = [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]},
    ]
    if request.include_usage:
        chunks.append({**common, "choices": [], "usage": usage})
    lines = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return HttpReply(200, "".join(f"data: {line}\n\n" for line in lines).encode(), _EVENTS)


def write_json(content: dict[str, Any], status: int = 200) -> HttpReply:
    """Write a reply of JSON."""
    return HttpReply(status, json.dumps(content).encode())


def write_refusal(error: SessionError) -> HttpReply:
    """Write a refusal in the form of OpenAI's errors."""
    fields = {"message": str(error), "type": error.kind, "param": error.param, "code": error.kind}
    return write_json({"error": fields}, error.status)


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise SessionError(400, "the body is not JSON") from None
    if not isinstance(given, dict):
        raise SessionError(400, "the body is not a JSON object")
    return given


def _read_message(message: Any, name: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise SessionError(400, f"{name}: expected an object with a role", name)
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if whole else 0
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise SessionError(400, f"{name}.content: expected a text, or parts of the type text", name)
    read: Message = {"role": replace_halves(message["role"]), "content": replace_halves(content)}
    for field in ("name", "tool_call_id"):
        if isinstance(message.get(field), str):
            read[field] = replace_halves(message[field])
    if message.get("tool_calls"):
        read["tool_calls"] = _read_calls(message["tool_calls"], f"{name}.tool_calls")
    return read


def _read_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Calls with their names and arguments, which are JSON as in a reply."""
    read = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        texts = [function.get(key) for key in ("name", "arguments")] if isinstance(function, dict) else [None]
        if not isinstance(function, dict) or not all(isinstance(text, str) for text in texts):
            raise SessionError(400, f"{name}: expected functions with name and arguments, two texts", name)
        kept = {key: replace_halves(function[key]) for key in ("name", "arguments")}
        try:
            if not isinstance(json.loads(kept["arguments"] or "{}"), dict):
                raise ValueError
        except (ValueError, RecursionError):
            raise SessionError(400, f"{name}: expected arguments that are a JSON object", name) from None
        read.append({"type": "function", "function": kept})
    return read


def _read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    given = [] if tools is None else tools
    names = [
        tool["function"].get("name")
        for tool in (given if isinstance(given, list) else [None])
        if isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
    ]
    valid = [isinstance(name, str) and _TOOL.fullmatch(name) for name in names]
    if not isinstance(given, list) or len(names) != len(given) or not all(valid):
        raise SessionError(400, f"tools is {_show(tools)}: expected functions with names of {_TOOL.pattern}", "tools")
    return tuple(given)


def _read_stop(stop: Any) -> tuple[str, ...]:
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(texts, list)
        or len(texts) > _MOST_STOPS
        or not all(isinstance(text, str) and 1 <= len(text) <= _LONGEST_STOP for text in texts)
    ):
        expected = f"up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters"
        raise SessionError(400, f"stop is {_show(stop)}: expected {expected}", "stop")
    return tuple(replace_halves(text) for text in texts)


def _show(value: Any) -> str:
    return json.dumps(value)[:80]
