"""vLLM's own OpenAI-compatible routes on the running engine, called in process instead of through a socket."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from forage_rollout.chats.memory import ChatMemory
from forage_rollout.chats.serving import HEADER, build_chat_class, recalled
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.files.template_values import build_template_values, read_template_values
from forage_runtime.settings import Settings
from forage_runtime.text.chat_template import CLOCK, read_clock

CHATS = "/v1/chat/completions"
PATHS = {"/v1/models": "GET", CHATS: "POST", "/v1/completions": "POST"}
"""Path → method of the requests that are forwarded."""

ResponseHead = tuple[int, list[tuple[str, str]]]
"""Status and headers of a reply."""
_CLOSE_TIMEOUT_S = 5.0
_MAX_QUEUED_PARTS = 64  # of a reply with a slow reader; further parts wait inside vLLM while generation goes on


class Engine(Protocol):
    """What the routes need of an engine; see `VllmEngine`."""

    @property
    def llm(self) -> Any: ...

    @property
    def out_of_service(self) -> str: ...


class OpenAiRoutes:
    """Answers requests with vLLM's serving classes.

    Args:
        engine: the running engine; its `llm` is another one once a policy was loaded afresh.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._llm: Any = None
        self._app: Any = None

    def _find_app(self) -> Any:
        llm = self._engine.llm
        if llm is not self._llm:
            self._llm, self._app = llm, _build_app(llm, self._settings)
        return self._app

    async def forward_openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Answer one request: first (status, headers), then the body in parts.

        Closing the iterator early ends the generation. Out of service the engine answers with 503 and the reason: every
        other one is, too, or the router would have sent the request there.
        """
        if reason := self._engine.out_of_service:
            yield 503, [("content-type", "application/json"), ("retry-after", "1")]
            yield json.dumps({"error": {"message": reason, "type": "unavailable", "param": None}}).encode()
            return
        parts: asyncio.Queue[ResponseHead | bytes | None] = asyncio.Queue(_MAX_QUEUED_PARTS)
        unread = [body]
        closed = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await closed.wait()  # wait: the life of a request
            return {"type": "http.disconnect"}  # upon which vLLM ends the generation

        async def send(message: dict[str, Any]) -> None:
            if closed.is_set():
                return
            if message["type"] == "http.response.start":
                raw = message.get("headers", ())
                names = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in raw]
                await parts.put((message["status"], names + [(HEADER, str(one)) for one in recalled.get()]))
            elif message.get("body"):
                await parts.put(message["body"])

        async def answer() -> None:
            recalled.set([])
            try:
                await self._find_app()(_build_scope(method, path, headers), receive, send)
            finally:
                if not closed.is_set():
                    await parts.put(None)

        answering = asyncio.create_task(answer())
        try:
            while (part := await parts.get()) is not None:
                yield part
            await answering
        finally:
            closed.set()
            while not parts.empty():  # a `send` that waits for room must be able to end
                parts.get_nowait()
            await asyncio.wait({answering}, timeout=_CLOSE_TIMEOUT_S)  # wait: has a time limit
            answering.cancel()


def _build_scope(method: str, path: str, headers: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": None,
        "server": None,
    }


def _build_app(llm: Any, settings: Settings) -> Any:
    """vLLM's routes for `PATHS` and its error handlers, as an ASGI application."""
    from fastapi import FastAPI
    from vllm.entrypoints.openai.chat_completion.api_router import router as chat
    from vllm.entrypoints.openai.completion.api_router import router as completion
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models.api_router import router as models
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.renderers.online_renderer import OnlineRenderer

    name = settings.model.path.resolve().name
    served = OpenAIServingModels(llm, [BaseModelPath(name=name, model_path=name)])
    variables, today = read_template_values(build_template_values(settings))
    template: dict[str, Any] = {
        "chat_template": None,
        "chat_template_content_format": "auto",
        "default_chat_template_kwargs": variables | ({CLOCK: read_clock(today)} if today else {}),
    }
    renderer = OnlineRenderer(llm.model_config, llm.renderer, request_logger=None, **template)
    common: dict[str, Any] = {"online_renderer": renderer, "request_logger": None}
    app = FastAPI(openapi_url=None)
    app.state.args = Namespace(log_error_stack=False)
    app.state.openai_serving_models = served
    memory = ChatMemory(FileTokenizer(settings.model.path), llm.model_config.max_model_len)
    app.state.openai_serving_chat = build_chat_class(memory)(llm, served, "assistant", **common, **template)
    # Replies say how many prompt tokens the prefix cache held: `forage probe` counts them.
    app.state.openai_serving_completion = OpenAIServingCompletion(
        llm, served, enable_prompt_tokens_details=True, **common
    )
    for router in (models, chat, completion):
        app.include_router(router)
    init_exception_handler(app)
    return app
