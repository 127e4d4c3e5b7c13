"""Clients of a run whose groups are in files beside Redis."""

from __future__ import annotations

from pathlib import Path

from forage_queue.streams.client import StreamClient
from forage_queue.streams.payloads import Payloads
from forage_runtime.settings import RedisSettings, Settings, load_settings


def load_payload_settings(server: RedisSettings, folder: Path, inline_bytes: int) -> Settings:
    own = [f"redis.url={server.url}", f"run.dir={folder}", "run.id=run", f"redis.inline_bytes={inline_bytes}"]
    return load_settings(None, own, {})


def open_payload_client(settings: Settings) -> StreamClient:
    return StreamClient(settings.redis, "run", 2.0, payloads=Payloads(settings))


def start_trainer(client: StreamClient) -> StreamClient:
    """Have the client take the run over, and offer its place for files."""
    client.create_groups()
    client.acquire_epoch()
    client.offer_payloads()
    return client
