"""Scripts of the streams change everything or nothing: Redis does not roll a script back that fails half-way."""

from __future__ import annotations

import pytest
import redis
from stream_calls import CALLS, ENTRY, GROUP

from forage_queue.streams.functions import build_library, list_scripts, name_function
from forage_runtime.settings import RedisSettings

CASES = [(name, place) for name, (keys, _) in CALLS.items() for place in range(len(keys))]


def fill(server: redis.Redis) -> None:
    server.function_load(build_library().code)
    for name in ("prompts", "replies", "trajectories"):
        server.xadd(name, {"m": "message"}, id=ENTRY)
        server.xgroup_create(name, GROUP, "0")
        server.xreadgroup(GROUP, "worker", {name: ">"})
    server.set("epoch", 1)
    server.set("shift", "shift")
    server.hset("policy", mapping={"epoch": 1, "m": "policy"})
    server.hset("issued:1", "0/0", f"{ENTRY} uid")
    server.hset("issued", "9", "0/0 uid")
    server.hset("stored:1", ENTRY, "name")
    server.hset("ledger", "9", "entry")
    server.hset("replicas", "gone", "policy")
    server.zadd("alive", {"gone": 1})


def dump_all(server: redis.Redis) -> dict[bytes, bytes]:
    return {key: server.dump(key) for key in server.scan_iter()}


def test_every_script_is_called() -> None:
    assert sorted(CALLS) == list(list_scripts())


@pytest.mark.parametrize(("name", "place"), CASES, ids=[f"{name}-{CALLS[name][0][place]}" for name, place in CASES])
def test_a_key_of_another_type_leaves_all_others_as_they_were(
    redis_server: RedisSettings, name: str, place: int
) -> None:
    server = redis.Redis.from_url(redis_server.url)
    fill(server)
    keys, arguments = CALLS[name]
    server.delete(keys[place])
    server.sadd(keys[place], "of another type")
    before = dump_all(server)
    try:
        server.fcall(name_function(name), len(keys), *keys, *arguments)
    except redis.ResponseError:
        assert dump_all(server) == before


def test_an_issue_table_that_was_tampered_with_leaves_its_batch_unacknowledged(redis_server: RedisSettings) -> None:
    server = redis.Redis.from_url(redis_server.url)
    fill(server)
    server.hset("issued:1", "1/0", "nonsense")
    keys, arguments = CALLS["acknowledge"]
    assert server.fcall(name_function("acknowledge"), len(keys), *keys, *arguments) == [b"name"]
    assert server.hget("ledger", "1") == b"entry"
    assert server.xlen("replies") == 0
