"""An HTTP server of files on loopback that can break off, refuse ranges, or redirect."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class FileServer:
    """Serves `files` by path.

    Attributes:
        files: content by path, without the first slash.
        break_after: bytes of a reply after which the connection ends; 0: never.
        has_ranges: whether a part of a file can be asked for.
        statuses: answers to send instead, by path.
        headers: more headers, by path.
        requests: method, path and range of every request.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.break_after = 0
        self.has_ranges = True
        self.statuses: dict[str, int] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.requests: list[tuple[str, str, str]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                outer._answer(self)

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.lstrip("/").partition("?")[0]
        self.requests.append((request.command, path, request.headers.get("range", "")))
        headers = self.headers.get(path, {})
        content = self.files.get(path, b"")
        status = self.statuses.get(path, 200 if path in self.files else 404)
        part = content
        if status == 200 and self.has_ranges and (wanted := request.headers.get("range")):
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            status, part = 206, content[begin:]
            headers = headers | {"content-range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        request.send_response(status)
        for name, value in ({"content-length": str(len(part))} | headers).items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(part[: self.break_after or len(part)])
            if self.break_after:
                request.close_connection = True


@contextmanager
def serve_files() -> Iterator[FileServer]:
    server = FileServer()
    try:
        yield server
    finally:
        server.close()
