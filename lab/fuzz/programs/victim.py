"""A server with every fault that fuzzing looks for, to test that it finds them: python -m fuzz.programs.victim PORT"""

from __future__ import annotations

import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_kept: list[bytes] = []


class Victim(BaseHTTPRequestHandler):
    """Fails as the body asks for it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # the name is http.server's
        self._reply(200)

    def do_POST(self) -> None:  # the name is http.server's
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"die" in body:
            os._exit(3)
        if b"sleep" in body:
            time.sleep(600)
        if b"leak" in body:
            _kept.append(b"\1" * 2**20)
        if b"print" in body:
            print("no line of JSON", file=sys.stderr, flush=True)
        self._reply(500 if b"fail" in body else 503 if b"full" in body else 200)

    def _reply(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Victim).serve_forever()
