"""A small real server of the text-embeddings-inference protocol over an encoder; failures can be set."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel
from waiting import WAIT_S

from forage_retriever.encoders.encoder import Encoder

MAX_BATCH = 4


class EmbedRequest(BaseModel):
    inputs: list[str]
    normalize: bool
    truncate: bool


class RerankRequest(BaseModel):
    query: str
    texts: list[str]
    truncate: bool


class Server:
    """The server: an encoder, a scoring function and the next failures.

    Attributes:
        failures: status codes of the next answers; 0 = no answer within the client's time limit.
        width: vectors are truncated to so many numbers.
        calls: requested paths.
    """

    def __init__(self, encoder: Encoder, score: Callable[[str, Sequence[str]], Sequence[float]]) -> None:
        self.failures: list[int] = []
        self.width = encoder.dimension
        self.calls: list[str] = []
        self.url = ""
        self._encoder = encoder
        self._score = score

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/info")
        async def info() -> Any:
            return await self._next_failure("/info") or {
                "model_id": "sentence-transformers/all-MiniLM-L6-v2",
                "model_sha": "c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
                "max_client_batch_size": MAX_BATCH,
            }

        @app.post("/embed")
        async def embed(request: EmbedRequest) -> Any:
            assert len(request.inputs) <= MAX_BATCH
            assert request.truncate
            if failure := await self._next_failure("/embed"):
                return failure
            return self._encoder.encode_queries(request.inputs)[:, : self.width].tolist()

        @app.post("/rerank")
        async def rerank(request: RerankRequest) -> Any:
            if failure := await self._next_failure("/rerank"):
                return failure
            scores = self._score(request.query, request.texts)
            best = sorted(range(len(scores)), key=lambda place: -scores[place])  # as the protocol has it: best first
            return [{"index": place, "score": scores[place]} for place in best]

        return app

    async def _next_failure(self, path: str) -> Response | None:
        self.calls.append(path)
        if not self.failures:
            return None
        status = self.failures.pop(0)
        if status == 0:
            await asyncio.sleep(3600)
        return Response(b'[{"index": 0' if status == 200 else b"", status, media_type="application/json")


@contextmanager
def serve_tei(encoder: Encoder, score: Callable[[str, Sequence[str]], Sequence[float]]) -> Iterator[Server]:
    """Serve on a free port of this machine, on a thread."""
    server = Server(encoder, score)
    listening = socket.create_server(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    http = uvicorn.Server(uvicorn.Config(server.app(), log_config=None, lifespan="off", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.should_exit = True
        thread.join(WAIT_S)
