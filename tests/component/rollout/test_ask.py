"""`forage ask` against a rollout service: the real API and agent over a real channel, the engine scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from rollout_backend import AgentBackend, LineEngine
from typer.testing import CliRunner

from forage_cli.main import app
from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_rollout.loop.generation import RenderedPrompt
from forage_rollout.serve.backend import ServiceState
from forage_rollout.serve.grpc_api import RolloutApi, make_server
from forage_runtime.settings import load_settings
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.text.chat_template import Chat

LIMITS = {"max_start_length": 900, "max_prompt_length": 5000, "max_obs_length": 500, "max_response_length": 500}


class Choosy(LineEngine):
    """With a template that does not take every question."""

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        if "why" in messages[0]["content"]:
            raise ValueError("no reasons are given")
        return await super().render_chat(messages, values)


@pytest.fixture
async def config(tmp_path: Path, char_codec: Any, free_address: Callable[[], str]) -> AsyncIterator[Path]:
    """Settings of a service that runs."""
    addresses = {"grpc_address": free_address(), "health_address": free_address()}
    tree: Mapping[str, Any] = {"rollout": {**addresses, **LIMITS, "engine": {"max_model_len": 9999}}}
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(tree))
    settings = load_settings(file, [], {})
    engine = Choosy(char_codec())
    engine.gate.set()
    health = Health()
    health.mark_started()
    state = ServiceState(health, running=True)
    api = RolloutApi(AgentBackend(settings, engine), state, 0x110000)
    server, _ = make_server(addresses["grpc_address"], api, None, settings.tls)
    await server.start()
    probes = serve_health(addresses["health_address"], health)
    yield file
    probes.shutdown()
    await server.stop(None)


async def ask(config: Path, question: str) -> Result:
    words = ["ask", question, "--config", str(config)]
    return await asyncio.to_thread(CliRunner().invoke, app, words, catch_exceptions=False)


async def test_a_finished_trajectory_is_exit_code_0(config: Path) -> None:
    done = await ask(config, "Who?")
    assert "me" in done.output
    assert done.exit_code == 0, done.output


async def test_a_failed_trajectory_is_exit_code_1_with_its_reason(config: Path) -> None:
    done = await ask(config, "Who, and why?")
    assert "STATUS_INVALID_INPUT: the chat template rejects the prompt: no reasons are given" in " ".join(
        done.output.split()
    )
    assert done.exit_code == 1
