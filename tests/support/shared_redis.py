"""One durable server for all tests of a folder, emptied before each: most tests need no server of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis_process import RedisProcess

from forage_runtime.settings import RedisSettings


@pytest.fixture(scope="session")
def shared_redis(
    redis_binary: str, free_address: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisSettings]:
    """Its file is in memory where there is such a disk, since every write is synced."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path_factory.mktemp("redis")) as folder:
        process = RedisProcess(redis_binary, Path(folder) / "redis", free_address().rpartition(":")[2])
        yield process.settings
        process.kill()


@pytest.fixture
def redis_server(shared_redis: RedisSettings) -> RedisSettings:
    """The shared server, with nothing in it."""
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
        client.function_flush()
    return shared_redis
