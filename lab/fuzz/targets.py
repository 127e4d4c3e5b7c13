"""What takes inputs over a network: calls of gRPC, requests of HTTP, entries of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import grpc

from fuzz.inputs import Fault, Input, Verdict
from fuzz.processes import Process

LIMIT_S = 120.0
"""Time in which every input must be answered."""

_PATIENCE_S = 0.03
"""Wait for an answer to bytes that may be no whole request."""

_STREAM_S = 0.2
"""A stream of server-sent events is read for so long: some never end."""

_HALF_OPEN = 30
"""Connections that are open all the time, with a request that does not end."""

_OWN_FAILURE = "Internal error from Core"
"""What the client of grpc.aio says where a server has ended a stream that it was still writing to."""

_HIDDEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)


class Target(Protocol):
    """A process that takes inputs of one wire."""

    processes: Sequence[Process]

    async def start(self) -> None:
        """Start it, or start it again after it has ended; returns once it takes inputs."""

    async def send(self, one: Input) -> Verdict:
        """Send an input and await what becomes of it, at most `LIMIT_S` and a little."""

    async def check(self) -> str:
        """Ask whether it is well, as a probe does: a sentence where it is not, else empty."""

    async def close(self) -> None:
        """Close connections; the processes are ended by the caller."""


class ServiceTarget:
    """A service: what is at which of its ports, and its health page.

    Args:
        grpc_methods: method → (whether requests are a stream, whether replies are).
        health: address and path of a page that answers 200 as long as the process is alive.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        health: tuple[int, str],
        http_port: int = 0,
        grpc_port: int = 0,
        grpc_methods: Mapping[str, tuple[bool, bool]] | None = None,
    ) -> None:
        self.processes = processes
        self._health_port, self._health_path = health
        self.http_port = http_port
        self._grpc_port = grpc_port
        self._methods = grpc_methods or {}
        self._channel: grpc.aio.Channel | None = None
        self._started = asyncio.Event()
        self._half_open: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._started.clear()
        await self.close()
        for process in self.processes:
            process.start()
        for port in filter(None, (self._health_port, self.http_port, self._grpc_port)):
            await asyncio.to_thread(self.processes[0].wait_for_port, port)
        if self._grpc_port:
            options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
            options += [("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 100)]
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._grpc_port}", options=options)
        if self.http_port:
            for _ in range(_HALF_OPEN):
                _, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
                writer.write(b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
                self._half_open.append(writer)
        self._started.set()

    async def send(self, one: Input) -> Verdict:
        await self._started.wait()  # while another input's crash is being mended
        if one.call == "http":
            return await send_http(self.http_port, one)
        if one.call == "tcp":
            return await send_bytes(self._grpc_port, one)
        return await self._call(one)

    async def check(self) -> str:
        request = f"GET {self._health_path} HTTP/1.1\r\nHost: 127.0.0.1:{self._health_port}\r\n\r\n".encode()
        verdict = await send_http(self._health_port, Input("health", "http", (request,)))
        return "" if verdict.outcome == "200" else f"{self._health_path} answered {verdict.outcome} {verdict.detail}"

    async def close(self) -> None:
        for writer in self._half_open:
            writer.close()
        self._half_open.clear()
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    async def _call(self, one: Input) -> Verdict:
        assert self._channel is not None
        many, answers_many = self._methods[one.call]
        replies = 0
        try:
            if answers_many:
                open_call: Callable[[str], Any] = self._channel.stream_stream if many else self._channel.unary_stream
                async for _ in open_call(one.call)(iter(one.parts) if many else one.parts[0], timeout=LIMIT_S):
                    replies += 1
            else:
                await self._channel.unary_unary(one.call)(one.parts[0], timeout=LIMIT_S)
        except grpc.aio.AioRpcError as error:
            if error.details() == _OWN_FAILURE:
                return Verdict("ended early")
            return _judge_status(error.code(), error.details() or "")
        return Verdict("OK")


async def send_http(port: int, one: Input) -> Verdict:
    """Send the pieces of a request on a connection of its own, and read the answer."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port, limit=2**20), LIMIT_S)
    except TimeoutError:
        return Verdict("", Fault.HANG, f"no connection within {LIMIT_S:g} s")
    except OSError as error:
        return Verdict("", Fault.CRASH, f"no connection: {error}")
    try:
        sending = asyncio.create_task(_send_pieces(writer, one))
        try:
            limit_s = LIMIT_S if one.complete else _PATIENCE_S + one.pause_s * len(one.parts)
            status = await asyncio.wait_for(_read_answer(reader), limit_s)
        except TimeoutError:
            if one.complete:
                return Verdict("", Fault.HANG, f"no answer within {LIMIT_S:g} s")
            return await _await_close(reader, writer, sending)
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending
        return _judge_http(status)
    finally:
        writer.close()


async def send_bytes(port: int, one: Input) -> Verdict:
    """Send bytes that are no call to a port of gRPC: the server closes, sooner or later, or says what it wants."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), LIMIT_S)
    except TimeoutError:
        return Verdict("", Fault.HANG, f"no connection within {LIMIT_S:g} s")
    except OSError as error:
        return Verdict("", Fault.CRASH, f"no connection: {error}")
    try:
        sending = asyncio.create_task(_send_pieces(writer, one))
        return await _await_close(reader, writer, sending)
    finally:
        writer.close()


async def _send_pieces(writer: asyncio.StreamWriter, one: Input) -> None:
    with suppress(ConnectionError):  # a server may hang up before the end
        for number, piece in enumerate(one.parts):
            if number and one.pause_s:
                await asyncio.sleep(one.pause_s)
            writer.write(piece)
            await writer.drain()


async def _await_close(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sending: asyncio.Task[None]
) -> Verdict:
    status = None
    try:
        async with asyncio.timeout(LIMIT_S + (0.0 if sending.done() else LIMIT_S)):
            await sending
            with suppress(OSError):
                writer.write_eof()
            with suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
                head = await reader.readline()
                parts = head.split()
                status = int(parts[1]) if head.startswith(b"HTTP/1.") and len(parts) > 1 else None
                while await reader.read(2**16):
                    pass
    except TimeoutError:
        return Verdict("", Fault.HANG, f"the connection was not closed within {LIMIT_S:g} s of the last byte")
    return _judge_http(status)


async def _read_answer(reader: asyncio.StreamReader) -> int | None:
    """Read an answer to its end; returns its status, or None where the server closed without one."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        if b"event-stream" in fields.get(b"content-type", b""):
            with suppress(TimeoutError):
                async with asyncio.timeout(_STREAM_S):  # lint: short because some streams never end
                    while await reader.read(2**16):
                        pass
        elif b"chunked" in fields.get(b"transfer-encoding", b""):
            while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                await reader.readexactly(size + 2)
        else:
            await reader.readexactly(int(fields.get(b"content-length", b"0")))
        return int(head.split()[1])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _judge_http(status: int | None) -> Verdict:
    if status is None:
        return Verdict("closed")
    fault = Fault.ERROR if status >= 500 and status != 503 else None
    return Verdict(str(status), fault)


def _judge_status(code: grpc.StatusCode, detail: str) -> Verdict:
    fault = None
    if code in _HIDDEN:
        fault = Fault.ERROR
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in detail:  # of this end, not an answer
        fault = Fault.HANG
    return Verdict(code.name, fault, detail)


class StreamTarget:
    """A stream of Redis and the process that reads it: each entry must leave the stream.

    Args:
        redis_port: of a server of its own.
        key: of the stream.
    """

    def __init__(self, processes: Sequence[Process], redis_port: int, key: str) -> None:
        import redis.asyncio

        self.processes = processes
        self._port = redis_port
        self._key = key
        self._redis = redis.asyncio.Redis(port=redis_port)

    async def start(self) -> None:
        server, *readers = self.processes
        if not hasattr(server, "popen") or not server.is_alive:
            server.start()
            await asyncio.to_thread(server.wait_for_port, self._port)
            await self._redis.flushall()
        for process in readers:
            process.start()
        deadline = time.monotonic() + 120
        while not await self._redis.exists("fuzz:ready"):
            if time.monotonic() > deadline or not readers[0].is_alive:
                raise RuntimeError(f"the reader of {self._key} does not start: {readers[0].describe_end()}")
            await asyncio.sleep(0.05)

    async def send(self, one: Input) -> Verdict:
        fields = {name: part for name, part in zip((one.name or "m",), one.parts, strict=False)}
        id = await self._redis.xadd(self._key, fields)
        deadline, pause_s = time.monotonic() + LIMIT_S, 0.002
        while await self._redis.xrange(self._key, id, id):
            if not self.processes[1].is_alive:
                return Verdict("", Fault.CRASH, self.processes[1].describe_end())
            if time.monotonic() > deadline:
                await self._redis.xdel(self._key, id)
                return Verdict("", Fault.HANG, f"the entry was on the stream for {LIMIT_S:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(0.05, 1.5 * pause_s)
        return Verdict("taken")

    async def check(self) -> str:
        return "" if self.processes[1].is_alive else "the reader has ended"

    async def close(self) -> None:
        await self._redis.aclose()
