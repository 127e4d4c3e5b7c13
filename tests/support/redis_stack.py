"""Redis as `forage up` starts it, with a user for each service, and commands in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner
from waiting import wait_until

from forage_cli.local.stack import Program, Stack
from forage_cli.main import app
from forage_queue.streams.client import StreamClient
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import Settings, load_settings


@pytest.fixture
def settings(tmp_path: Path, free_address: Callable[[], str]) -> Settings:
    address = f"redis.url=redis://{free_address()}/0"
    return load_settings(None, [f"run.dir={tmp_path}/runs", "run.id=own", address, "redis.timeout_s=2"], {})


@pytest.fixture
def stack(settings: Settings) -> Iterator[Stack]:
    stack = Stack(settings, [Program.REDIS])
    stack.start()
    yield stack
    stack.stop()


def open_streams(settings: Settings) -> StreamClient:
    """A client once the server has started and its functions are there."""
    client = StreamClient(settings.redis, settings.run.id, patience_s=20)

    def is_ready() -> bool:
        try:
            client.read_replicas()
        except (SettingsError, UnavailableError):
            return False
        return True

    wait_until(is_ready, "the server gets ready")
    return client


def run_forage(*arguments: str) -> str:
    ended = CliRunner().invoke(app, [*arguments])
    assert ended.exit_code == 0, ended.output
    return ended.stdout
