"""What a caller of an HTTP port may hold before anybody knows who it is: bytes of a head, time, and connections.

uvicorn itself reads a head of any size for any time: one caller without a token would fill the memory, and a thousand
silent ones would take the connections of the probes.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forage_runtime.addresses import bound_by_descriptors

HEAD_BYTES = 2**16
"""Of a request's line and headers; also of what surrounds the chunks of a body."""
HEAD_S = 10.0
"""From a connection, or from the first byte of a further request, to the end of the head."""
STALLED_S = 60.0
"""How long a caller may leave an answer unread that does not fit into the buffers."""
_MOST_QUIET = 2048
_DETAIL = json.dumps({"detail": f"line and headers of the request have more than {HEAD_BYTES} bytes: send less"})
_TOO_LARGE = (
    "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\nConnection: close\r\n"
    f"Content-Length: {len(_DETAIL)}\r\n\r\n{_DETAIL}"
).encode()


class QuietConnections:
    """The connections of a server without a request in progress. Where there are too many, the oldest one ends.

    Args:
        most: by default a quarter of the files that this process may open, so that probes always find room.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most or bound_by_descriptors(_MOST_QUIET, 4)
        self._quiet: dict[object, asyncio.BaseTransport] = {}

    def add(self, connection: object, transport: asyncio.BaseTransport) -> None:
        self._quiet.pop(connection, None)
        self._quiet[connection] = transport
        if len(self._quiet) > self._most:
            oldest = next(iter(self._quiet))
            end = self._quiet.pop(oldest)
            assert isinstance(end, asyncio.WriteTransport)
            end.abort()

    def remove(self, connection: object) -> None:
        self._quiet.pop(connection, None)


class BoundedProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """uvicorn's protocol within these limits.

    Args:
        quiet: shared by the connections of a server.
    """

    timeout_keep_alive_task: asyncio.TimerHandle | None

    def __init__(self, quiet: QuietConnections, **options: Any) -> None:
        super().__init__(**options)
        self._quiet = quiet
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._unplaced = 0  # bytes since the parser last came to the end of a head or to a piece of a body
        self._in_message = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._quiet.add(self, transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._become_busy()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unplaced += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unplaced > HEAD_BYTES:
            if self._is_busy:
                self.transport.abort()
            else:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
        elif not self._is_busy and (self._in_message or self._unplaced):
            self._expect_head()
        elif not self._is_busy and self.timeout_keep_alive_task is None:  # the body of an answered request has ended
            self._stop_clock()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        self._in_message = True
        self._unplaced = self._unplaced or 1  # a head that began in the packet with the end of another request
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unplaced = 0
        super().on_headers_complete()
        self._become_busy()

    def on_body(self, body: bytes) -> None:
        self._unplaced = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unplaced = 0
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy and not self.transport.is_closing():
            self._quiet.add(self, self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _become_busy(self) -> None:
        self._quiet.remove(self)
        self._stop_clock()

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
