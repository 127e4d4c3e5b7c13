"""Servers that can lose what they have acknowledged are recognised, real servers with each defect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis_process import serve

from forage_queue.streams.client import StreamClient
from forage_queue.streams.durability import check_durability, require_durability
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RedisSettings


def check(settings: RedisSettings) -> list[str]:
    return check_durability(StreamClient(settings, "run", patience_s=1), settings)


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("appendonly", "no", "keeps no append-only file .* set appendonly yes"),
        ("appendfsync", "everysec", "appendfsync everysec: set appendfsync always"),
        ("maxmemory-policy", "allkeys-lru", "maxmemory-policy allkeys-lru.: set maxmemory-policy noeviction"),
    ],
)
def test_an_option_that_loses_writes_is_named_with_its_remedy(
    own_redis: RedisSettings, option: str, value: str, problem: str
) -> None:
    assert check(own_redis) == []
    redis.Redis.from_url(own_redis.url).config_set(option, value)
    with pytest.raises(SettingsError, match=f"can lose what it has acknowledged: .*{problem}; or accept"):
        require_durability(StreamClient(own_redis, "run"), own_redis)


def test_eviction_of_keys_with_an_expiry_takes_none_of_a_run(own_redis: RedisSettings) -> None:
    redis.Redis.from_url(own_redis.url).config_set("maxmemory-policy", "volatile-lru")
    assert check(own_redis) == []


def test_a_server_that_does_not_tell_its_configuration_is_named(own_redis: RedisSettings) -> None:
    admin = redis.Redis.from_url(own_redis.url)
    rights = ["~forage:*", "+@all", "-@dangerous", "+info"]
    admin.execute_command("ACL", "SETUSER", "forage", "on", ">word", *rights)
    settings = own_redis.model_copy(update={"url": own_redis.url.replace("//", "//forage:word@")})
    (problem,) = check(settings)
    assert "allow CONFIG GET" in problem
    admin.execute_command("ACL", "SETUSER", "forage", "+config|get")
    assert check(settings) == [], "the rights that docs/operate/redis.md names are enough"


def test_replicas_need_confirmed_writes(
    tmp_path: Path, own_redis: RedisSettings, redis_binary: str, free_address: Callable[[], str]
) -> None:
    admin = redis.Redis.from_url(own_redis.url)
    admin.config_set("repl-diskless-sync-delay", "0")
    primary = own_redis.url.removeprefix("redis://").removesuffix("/0").replace(":", " ")
    with serve(redis_binary, tmp_path / "replica", free_address().rpartition(":")[2], "--replicaof", primary):
        assert admin.wait(num_replicas=1, timeout=120_000) == 1
        (problem,) = check(own_redis)
        assert problem.endswith("set redis.wait_replicas=1")
        assert check(own_redis.model_copy(update={"wait_replicas": 1})) == []


def test_a_user_can_accept_the_loss(own_redis: RedisSettings, capsys: pytest.CaptureFixture[str]) -> None:
    redis.Redis.from_url(own_redis.url).config_set("appendfsync", "no")
    accepted = own_redis.model_copy(update={"require_durable": False})
    require_durability(StreamClient(accepted, "run"), accepted)
    captured = capsys.readouterr()
    assert "set appendfsync always" in captured.out + captured.err
