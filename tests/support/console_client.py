"""The console's interface without a server, for tests of its replies."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import tempfile
import weakref
from pathlib import Path
from typing import Any

import httpx  # lint: socket because it calls the application in this process
from fastapi import FastAPI
from limits import WAIT_S
from starlette.datastructures import State
from upath import UPath

from forage_console.app import make_app
from forage_console.context import Console
from forage_console.store import run_store
from forage_runtime.settings import ConsoleSettings, Settings

run_store.WAIT_S = WAIT_S  # a page answers after a moment with the files that it has read by then; tests want all


@functools.cache
def _make_routes() -> FastAPI:
    return make_app(Console(UPath("runs"), Settings()))


def copy_app(console: Console) -> FastAPI:
    """What `make_app` makes, with routes that are made once: they would take most of the time of a test."""
    made = _make_routes()
    app, app.router = copy.copy(made), copy.copy(made.router)
    app.router.routes, app.router.middleware_stack = [*made.router.routes], app.router.app
    app.exception_handlers = {**made.exception_handlers}
    app.state = State({"console": console})
    return app


def _close(state: State, cache: tempfile.TemporaryDirectory[str]) -> None:
    if hasattr(state, "stores"):
        state.stores.close()  # its threads write into the folder
    cache.cleanup()


class ConsoleClient:
    """Asks the interface over the runs of a folder."""

    def __init__(self, runs: Path | UPath, trace_url: str = "") -> None:
        self._cache = tempfile.TemporaryDirectory(prefix="console-test-")
        own = ConsoleSettings(cache_dir=Path(self._cache.name), trace_url=trace_url)
        self._app = copy_app(Console(UPath(runs), Settings(console=own)))
        weakref.finalize(self, _close, self._app.state, self._cache)

    def ask(self, path: str, **query: Any) -> httpx.Response:
        """Send a GET request below /api; an exception in the console is the test's."""
        return self._request("GET", path, params=query or None)  # not {}: it would replace the path's own

    def send(self, method: str, path: str, body: Any) -> httpx.Response:
        """Send a request with a body below /api."""
        options = {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
        return self._request(method, path, **options)

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
                return await client.request(method, f"/api{path}", **options)

        return asyncio.run(send())

    def read(self, path: str, **query: Any) -> Any:
        """The reply to a request that must succeed."""
        reply = self.ask(path, **query)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def read_problem(self, path: str, status: int, **query: Any) -> str:
        """The sentence of a request that must fail."""
        reply = self.ask(path, **query)
        assert reply.status_code == status, reply.text
        assert list(reply.json()) == ["detail"]
        return str(reply.json()["detail"])
