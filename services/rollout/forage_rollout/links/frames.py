"""Frames of the connections between agents and engines: fixed fields and packed arrays, nothing pickled.

A frame is its header (bytes of the body, kind, number of the request) and the body. Numbers are little-endian: a token
has 32 bits, and a log-probability is the 32-bit float that a trajectory keeps.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_runtime.text.chat_template import Chat

VERSION = 3
HEADER = struct.Struct("<IBxxxI")
_REQUEST = struct.Struct("<ddqqiIIIII")
_GENERATION = struct.Struct("<?xxxII")
_SEGMENT = struct.Struct("<qqII")
_LENGTH = struct.Struct("<I")
_UNSEEDED = -1


class Kind(IntEnum):
    """What a frame holds; requests and the replies to them have the same number."""

    CHALLENGE = 1
    """Server, first: the version of these frames, and a nonce."""
    PROOF = 2
    """Client: a nonce, and the proof that it knows the replica's key."""
    WELCOME = 3
    """Server: the proof that it is the replica."""
    GENERATE = 4
    RENDER = 5
    """A chat, and what its template gets besides, as JSON."""
    RELEASE = 6
    """The name of an affinity; there is no reply."""
    CANCEL = 7
    """The number is that of the request that is given up; there is no reply."""
    GENERATED = 8
    RENDERED = 9
    FAILED = 10
    """The kind of an error, see `connection.pack_failure`, and its sentence."""
    LEAVING = 11
    """Server: this replica ends; send it nothing more."""
    PING = 12
    """Client: asks for a sign of life."""
    PONG = 13
    """Server: its event loop runs; a byte that says whether its engine stands still."""


class FrameError(Exception):
    """The bytes are no frame of this protocol."""


class FrameReader:
    """Cuts what arrives into frames.

    Attributes:
        limit: bytes that a body may have.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """The frames that are complete now: kind, number, body.

        Raises:
            FrameError: a body is longer than `limit`.
        """
        buffer, begin = self._buffer, 0
        buffer += data
        while len(buffer) - begin >= HEADER.size:
            length, kind, number = HEADER.unpack_from(buffer, begin)
            if length > self.limit:
                raise FrameError(f"a frame of {length} bytes, at most {self.limit} are read")
            end = begin + HEADER.size + length
            if len(buffer) < end:
                break
            yield kind, number, bytes(buffer[begin + HEADER.size : end])
            begin = end
        del buffer[:begin]


def pack_frame(kind: Kind, number: int, body: bytes = b"") -> bytes:
    """A whole frame."""
    return HEADER.pack(len(body), kind, number) + body


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids, each below 2³².

    Raises:
        OverflowError: one is not.
    """
    return _to_bytes(array("I", token_ids))


def unpack_tokens(data: bytes) -> list[int]:
    """What `pack_tokens` has packed.

    Raises:
        FrameError: the bytes are none of whole tokens.
    """
    return _from_bytes("I", data)


def pack_chat(messages: Chat, values: TemplateValues) -> bytes:
    """The body of RENDER."""
    return json.dumps([[dict(message) for message in messages], values.variables, values.today]).encode()


def unpack_chat(body: bytes) -> tuple[list[dict[str, str]], TemplateValues]:
    """What `pack_chat` has packed.

    Raises:
        FrameError: the bytes are no chat.
    """
    try:
        messages, variables, today = json.loads(body)
        return messages, TemplateValues(variables=variables, today=today)
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"no chat: {error}") from None


def pack_prompt(prompt: RenderedPrompt) -> bytes:
    """The body of RENDERED: the bytes of the opening, how many, and the tokens."""
    opening = prompt.opening.encode()
    return _LENGTH.pack(len(opening)) + opening + pack_tokens(prompt.token_ids)


def unpack_prompt(data: bytes) -> RenderedPrompt:
    """What `pack_prompt` has packed.

    Raises:
        FrameError: the bytes are no prompt.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        opening = data[_LENGTH.size : _LENGTH.size + length].decode()
    except (struct.error, ValueError) as error:
        raise FrameError(f"no prompt: {error}") from None
    return RenderedPrompt(unpack_tokens(data[_LENGTH.size + length :]), opening)


def pack_request(request: GenerationRequest) -> bytes:
    """The body of GENERATE."""
    affinity, stops = request.affinity.encode(), _pack_stops(request.stop)
    return b"".join(
        (
            _REQUEST.pack(
                request.temperature,
                request.top_p,
                _UNSEEDED if request.seed is None else request.seed,
                request.priority,
                request.top_k,
                request.max_tokens,
                request.min_tokens,
                len(affinity),
                len(stops),
                len(request.token_ids),
            ),
            affinity,
            stops,
            pack_tokens(request.token_ids),
        )
    )


def unpack_request(body: bytes) -> GenerationRequest:
    """What `pack_request` has packed.

    Raises:
        FrameError: the bytes are no request.
    """
    try:
        temperature, top_p, seed, priority, top_k, most, least, named, stopped, tokens = _REQUEST.unpack_from(body)
        stops_at = _REQUEST.size + named
        tokens_at = stops_at + stopped
        if len(body) != tokens_at + 4 * tokens:
            raise FrameError(f"a request of {len(body)} bytes, {tokens_at + 4 * tokens} are announced")
        return GenerationRequest(
            token_ids=unpack_tokens(body[tokens_at:]),
            max_tokens=most,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=None if seed == _UNSEEDED else seed,
            stop=_unpack_stops(body[stops_at:tokens_at]),
            min_tokens=least,
            affinity=body[_REQUEST.size : stops_at].decode(),
            priority=priority,
        )
    except (struct.error, ValueError) as error:
        raise FrameError(f"no request: {error}") from None


def pack_generation(generation: Generation) -> bytes:
    """The body of GENERATED, but for the load that `pack_failure` and the server put before it."""
    versions = generation.versions
    return b"".join(
        (
            _GENERATION.pack(generation.hit_length, len(versions), len(generation.token_ids)),
            *(_SEGMENT.pack(*segment) for segment in versions),
            pack_tokens(generation.token_ids),
            _to_bytes(array("f", generation.logprobs)),
        )
    )


def unpack_generation(body: bytes) -> Generation:
    """What `pack_generation` has packed.

    Raises:
        FrameError: the bytes are no generation.
    """
    try:
        hit_length, segments, tokens = _GENERATION.unpack_from(body)
    except struct.error as error:
        raise FrameError(f"no generation: {error}") from None
    tokens_at = _GENERATION.size + segments * _SEGMENT.size
    logprobs_at = tokens_at + 4 * tokens
    if len(body) != logprobs_at + 4 * tokens:
        raise FrameError(f"a generation of {len(body)} bytes, {logprobs_at + 4 * tokens} are announced")
    return Generation(
        token_ids=unpack_tokens(body[tokens_at:logprobs_at]),
        logprobs=_from_bytes("f", body[logprobs_at:]),
        hit_length=hit_length,
        versions=list(_SEGMENT.iter_unpack(body[_GENERATION.size : tokens_at])),
    )


@lru_cache(maxsize=256)
def _pack_stops(stops: tuple[str, ...]) -> bytes:
    return json.dumps(stops).encode()


@lru_cache(maxsize=256)
def _unpack_stops(data: bytes) -> tuple[str, ...]:
    stops = json.loads(data)
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise FrameError("stop texts are a list of texts")
    return tuple(stops)


def _to_bytes(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_bytes(type_code: str, data: bytes) -> list:  # type: ignore[type-arg]
    values = array(type_code)
    try:
        values.frombytes(data)
    except ValueError as error:
        raise FrameError(str(error)) from None
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
