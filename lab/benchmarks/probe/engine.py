"""The engine of the rollout behind its HTTP API, without the rest of the service, with counts of its tokens.

`python engine.py key=value …` serves `rollout.http_address` until stdin closes. It prints `{"ready": true}`, and
answers every line on stdin with one line: the tokens that the engine has computed, cached and generated so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import uvicorn

from forage_rollout.engine.openai import OpenAiRoutes, ResponseHead
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.serve.backend import ServiceState
from forage_rollout.serve.http_api import make_app
from forage_runtime.addresses import split_address
from forage_runtime.settings import Settings, load_settings
from forage_runtime.telemetry.health import Health


@dataclass
class Counts:
    """Tokens of contexts that were computed or found in the prefix cache, and tokens that were generated."""

    context: int = 0
    cached: int = 0
    generated: int = 0


class CompletionsOnly:
    """The part of `forage_rollout.serve.backend.Backend` that completions need."""

    def __init__(self, routes: OpenAiRoutes) -> None:
        self._routes = routes

    async def forward_openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        async for part in self._routes.forward_openai(method, path, headers, body):
            yield part


def count_tokens(llm: Any) -> Counts:
    """Count the tokens that vLLM's scheduler reports for every sequence; each sample of a request is one."""
    counts = Counts()
    process = llm.output_processor.process_outputs

    def process_and_count(outputs: Sequence[Any], *arguments: Any, **named: Any) -> Any:
        for output in outputs:
            counts.generated += len(output.new_token_ids)
            if output.prefill_stats is not None:
                counts.context += output.prefill_stats.num_computed_tokens
                counts.cached += output.prefill_stats.num_cached_tokens
        return process(outputs, *arguments, **named)

    llm.output_processor.process_outputs = process_and_count
    return counts


async def serve(settings: Settings) -> None:
    """Serve until stdin closes."""
    engine = VllmEngine(settings)
    counts = count_tokens(engine.llm)
    backend: Any = CompletionsOnly(OpenAiRoutes(engine.llm, settings))
    app = make_app(backend, ServiceState(Health(), running=True), settings)
    host, port = split_address(settings.rollout.http_address)
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_config=None, lifespan="off"))
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print_json({"ready": True})
    while await asyncio.to_thread(sys.stdin.readline):
        print_json(asdict(counts))
    server.should_exit = True
    await serving
    engine.shutdown()


def print_json(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(load_settings(overrides=sys.argv[1:])))
