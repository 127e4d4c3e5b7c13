"""The engine's OpenAI-compatible endpoints: vLLM's own, on the engine that runs, without a socket of their own."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from forage_common.settings import Settings

PATHS = {"/v1/models": "GET", "/v1/chat/completions": "POST", "/v1/completions": "POST"}
"""What is passed on, and by which method."""

Headers = list[tuple[str, str]]
Head = tuple[int, Headers]
_CLOSE_S = 5.0
_AHEAD = 64  # parts of a reply that wait for a slow reader; then generation goes on, and its parts wait with vLLM


class OpenAI:
    """Answers requests with vLLM's serving classes.

    Args:
        llm: the running `AsyncLLM`.
    """

    def __init__(self, llm: Any, settings: Settings) -> None:
        self._app = _application(llm, settings)

    async def handle(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[Head | bytes, None]:
        """The reply to one request: first (status, headers), then its body in parts.

        Closing the iterator early ends the generation.
        """
        parts: asyncio.Queue[Head | bytes | None] = asyncio.Queue(_AHEAD)
        unread = [body]
        closed = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await closed.wait()
            return {"type": "http.disconnect"}  # upon which vLLM ends the generation

        async def send(message: dict[str, Any]) -> None:
            if closed.is_set():
                return
            if message["type"] == "http.response.start":
                raw = message.get("headers", ())
                await parts.put((message["status"], [(k.decode("latin-1"), v.decode("latin-1")) for k, v in raw]))
            elif message.get("body"):
                await parts.put(message["body"])

        async def answer() -> None:
            try:
                await self._app(_scope(method, path, headers), receive, send)
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
            while not parts.empty():  # one that waits for room may go on
                parts.get_nowait()
            await asyncio.wait({answering}, timeout=_CLOSE_S)
            answering.cancel()


def _scope(method: str, path: str, headers: Sequence[tuple[str, str]]) -> dict[str, Any]:
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


def _application(llm: Any, settings: Settings) -> Any:
    """vLLM's routes for the three paths, and its handlers of errors."""
    from fastapi import FastAPI
    from vllm.entrypoints.openai.chat_completion.api_router import router as chat
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.api_router import router as completion
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models.api_router import router as models
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.renderers.online_renderer import OnlineRenderer

    name = settings.model.path.resolve().name
    served = OpenAIServingModels(llm, [BaseModelPath(name=name, model_path=name)])
    template: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
    renderer = OnlineRenderer(llm.model_config, llm.renderer, request_logger=None, **template)
    common: dict[str, Any] = {"online_renderer": renderer, "request_logger": None}
    app = FastAPI(openapi_url=None)
    app.state.args = Namespace(log_error_stack=False)
    app.state.openai_serving_models = served
    app.state.openai_serving_chat = OpenAIServingChat(llm, served, "assistant", **common, **template)
    # What the prefix cache saves is told: a probe counts it.
    app.state.openai_serving_completion = OpenAIServingCompletion(
        llm, served, enable_prompt_tokens_details=True, **common
    )
    for router in (models, chat, completion):
        app.include_router(router)
    init_exception_handler(app)
    return app
