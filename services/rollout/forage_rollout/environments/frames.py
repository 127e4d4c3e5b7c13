"""The messages between an agent and the process of an environment: JSON objects, with protobuf messages as base64.

| from the agent | fields |
|---|---|
| a call | id, call (budget, parse, respond or close), episode, turn, hit_length; text, or action |
| the first call of a trajectory | begin: prompt, sample |
| the end of a trajectory | end: its number |
| a call that nobody waits for any more | cancel: its id |
| the reply to a search | found: its number; result, or error |
| whether it still answers | ping |

| from the process | fields |
|---|---|
| the environment, once | name, tags, feedback, max_turns, stops, overrides |
| a reply | id; value, or error: kind, text, stack |
| a search | search: a number; for: id of the call, queries, topk, filters, mode |
| it still answers | pong |
"""

from __future__ import annotations

import asyncio
import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from forage_proto.v1.trajectory_pb2 import ActionKind, Document, Provenance
from forage_rollout.environments.environment import Action, Budget, Observation
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.clients.retriever import SearchResult
from forage_runtime.errors import UnavailableError
from forage_runtime.text.characters import replace_halves
from forage_sandbox.child import MAX_ANSWER_BYTES

Frame = dict[str, Any]
SERVICE_ERRORS = {kind.__name__: kind for kind in (UnavailableError, RefusedError, MalformedReplyError)}
"""Errors that mean the same on both sides."""
LONGEST_ERROR = 4000
"""Characters of an error's message, and of its stack."""
_LENGTH = struct.Struct("<I")


class FrameError(ValueError):
    """What came is no frame."""


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Read one frame.

    Raises:
        FrameError: it is longer than allowed, or no JSON object.
        IncompleteReadError, ConnectionError: the other side has ended.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_ANSWER_BYTES:
        raise FrameError(f"a message of {length} bytes, allowed are {MAX_ANSWER_BYTES}")
    try:
        frame = json.loads(await reader.readexactly(length))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a message that is no JSON ({type(error).__name__})") from None
    if not isinstance(frame, dict):
        raise FrameError("a message that is no JSON object")
    return frame


@dataclass(frozen=True)
class Description:
    """What the process says of its environment, once; see `Environment`.

    Attributes:
        overrides: those of budget and parse that are its own.
    """

    name: str
    tags: tuple[str, ...]
    feedback: str
    max_turns: int
    stops: tuple[str, ...]
    overrides: frozenset[str]


def read_description(body: bytes) -> Description:
    """Read the description; raises FrameError."""
    try:
        value = _check(json.loads(body), dict)
        texts = [str(value[name]) for name in ("name", "feedback")]
        lists = [tuple(map(str, _check(value[name], list))) for name in ("tags", "stops", "overrides")]
        return Description(texts[0], lists[0], texts[1], int(value["max_turns"]), lists[1], frozenset(lists[2]))
    except (ValueError, OverflowError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(f"a description that is none ({type(error).__name__})") from None


def pack_frame(frame: Mapping[str, Any]) -> bytes:
    """The bytes of a frame."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def pack_action(action: Action) -> list[Any]:
    return [int(action.kind), action.content, action.tag]


def read_action(value: Any) -> Action:
    """Read an action; raises FrameError."""
    kind, content, tag = _check(value, list, 3)
    if kind not in ActionKind.values() or not isinstance(content, str) or not isinstance(tag, str):
        raise FrameError(f"{value!r:.200} is no action")
    return Action(ActionKind.ValueType(kind), content, tag)


def pack_budget(budget: Budget) -> list[int]:
    return [index(budget.max_tokens), index(budget.min_tokens)]  # whole numbers of NumPy, too


def read_budget(value: Any) -> Budget:
    """Read a budget; raises FrameError, and ValueError where its numbers are wrong."""
    numbers = _check(value, list, 2)
    if not all(isinstance(number, int) for number in numbers):
        raise FrameError(f"{value!r:.200} is no budget")
    return Budget(*numbers)


def pack_observation(o: Observation) -> Frame:
    return {
        "texts": [o.body, o.opening, o.closing],
        "flags": [bool(o.succeeded), bool(o.partial)],
        "documents": [_pack(document) for document in o.documents],
        "provenance": _pack(o.provenance),
    }


def read_observation(value: Any) -> Observation:
    """Read an observation; raises FrameError."""
    fields = _check(value, dict)
    try:
        texts, flags = _check(fields["texts"], list, 3), _check(fields["flags"], list, 2)
        if not all(isinstance(text, str) for text in texts):
            raise FrameError("its texts are no strings")
        documents = tuple(Document.FromString(b64decode(d)) for d in _check(fields["documents"], list))
        provenance = Provenance.FromString(b64decode(fields["provenance"]))
    except FrameError:
        raise
    except Exception as error:  # noqa: BLE001 - of base64 and protobuf, which raise of many kinds
        raise FrameError(f"no observation ({type(error).__name__}: {error})") from None
    body, opening, closing = texts
    return Observation(body, opening, closing, bool(flags[0]), documents, provenance, bool(flags[1]))


def pack_result(result: SearchResult) -> Frame:
    return {
        "documents": [[_pack(document) for document in documents] for documents in result.documents],
        "provenance": _pack(result.provenance),
        "partial": result.partial,
    }


def read_result(value: Frame) -> SearchResult:
    """Read what the agent found."""
    return SearchResult(
        [[Document.FromString(b64decode(d)) for d in documents] for documents in value["documents"]],
        Provenance.FromString(b64decode(value["provenance"])),
        value["partial"],
    )


def pack_error(error: BaseException, stack: str = "", hint: str = "") -> Frame:
    kind = type(error).__name__
    return {"kind": kind if type(error) in SERVICE_ERRORS.values() else "", "text": f"{error}{hint}", "name": kind,
            "stack": stack}  # fmt: skip


def read_service_error(value: Any) -> Exception | None:
    """The error of a service that a reply tells of; None where it is one of the environment's own code."""
    kind = SERVICE_ERRORS.get(str(_check(value, dict).get("kind")))
    return kind(_shorten(value.get("text"))) if kind else None


def read_own_error(value: Frame) -> tuple[str, str]:
    """Name and message of an error of the environment's own code, and its stack: texts that any message can hold."""
    return f"{_shorten(value.get('name'))}: {_shorten(value.get('text'))}", _shorten(value.get("stack", ""))


def _shorten(text: object) -> str:
    return replace_halves(str(text)[:LONGEST_ERROR])


def _pack(message: Document | Provenance) -> str:
    return b64encode(message.SerializeToString()).decode()


def _check(value: Any, kind: type[list[Any]] | type[Frame], length: int | None = None) -> Any:
    if not isinstance(value, kind) or (length is not None and len(value) != length):
        raise FrameError(f"{value!r:.200}: expected a {kind.__name__}")
    return value
