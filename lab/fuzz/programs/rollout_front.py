"""The front of the rollout service, as in production; behind it the real agent and a scripted engine.

    python -m fuzz.programs.rollout_front CONFIG GRPC HTTP HEALTH

What Ray Serve and vLLM do behind it takes a minute to start and is the same for good and hostile prompts: they get what
the front has let pass.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn
from rollout_backend import AgentBackend, LineEngine

from forage_rollout.loop.tokens import FileTokenizer
from forage_rollout.serve.backend import ServiceState
from forage_rollout.serve.grpc_api import RolloutApi, make_server
from forage_rollout.serve.http_api import make_app
from forage_runtime.addresses import listen
from forage_runtime.settings import load_settings
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.logs import configure_logs
from fuzz.programs.forgetful import Forgetful


async def main(config: str, grpc_address: str, http_address: str, health_address: str) -> None:
    configure_logs("rollout")
    settings = load_settings(Path(config), [], {})
    tokenizer = FileTokenizer(settings.model.path)
    engine = LineEngine(tokenizer)
    engine.gate.set()
    engine.asked = Forgetful()
    backend, state = AgentBackend(settings, engine), ServiceState(Health())
    backend.passed = Forgetful()
    state.running = True
    state.health.mark_started()
    server, _ = make_server(grpc_address, RolloutApi(backend, state, tokenizer.vocabulary_size), None, settings.tls)
    config_http = uvicorn.Config(
        make_app(backend, state, settings, None),
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        lifespan="off",
    )
    serve_health(health_address, state.health)
    await server.start()
    await uvicorn.Server(config_http).serve([listen(http_address)])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
