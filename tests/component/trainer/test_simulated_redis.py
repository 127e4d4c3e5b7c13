"""The simulation's Redis answers as a real server does: random commands and the scripts of the streams on both."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from simulation.redis_store import Store

from forage_queue.streams.functions import build_library, is_read_only, name_function
from forage_runtime.settings import RedisSettings

_ID = re.compile(rb"\d{13}-\d+")
_STREAMS, _CONSUMERS, _GROUP = ("prompts", "replies"), ("a", "b"), "forage"
FENCED = {
    "acknowledge": (
        ["epoch", "{stream}", "ledger", "issued", "stored", "issued:1"],
        [_GROUP, "{step}", "entry", "1", "{step}", "{id}", "{id}"],
    ),
    "close_stream": (["epoch", "{stream}", "issued:1", "stored"], []),
    "discard": (["epoch", "{stream}", "stored"], [_GROUP, "{id}", "{id}"]),
    "issue": (["epoch", "prompts", "issued:1", "issued"], ["{position}/0", "uid", "prompt", "{step}"]),
    "list_stored": (["epoch", "{stream}", "stored"], []),
    "offer_payloads": (["epoch", "payloads"], ["mark"]),
    "prune": (["epoch", "replicas", "alive", "prompts", "replies"], [_GROUP, 60, 3_600_000]),
    "publish": (["epoch", "policy", "announced", "served"], ["policy"]),
    "reclaim": (["epoch", "{stream}"], [_GROUP, "{consumer}", "{id}", "{id}"]),
}
SCRIPTS = {
    "acknowledge_policy": (["replicas", "alive", "served"], ["{consumer}", "policy"]),
    "acquire_epoch": (["epoch", "policy"], ["{step}"]),
    "create_group": (["{stream}", "epoch", "issued:1"], [_GROUP, "{epoch}"]),
    "declare_environments": (["environments"], ["{}", 15]),
    "find_absent": (["prompts", "issued:1"], []),
    "finish": (
        ["prompts", "{stream}", "replies", "stored", "finished"],
        [_GROUP, "{id}", "group", "{consumer}", "{consumer}"],
    ),
    "read_replicas": (["replicas", "alive"], [60]),
    "reject": (["{stream}", "rejected", "stored", "epoch"], [_GROUP, "{id}", "content", 1000, "{epoch}"]),
}
COMMANDS = (
    "XADD {stream} * m value",
    "XADD {stream} * m value",
    "XADD served MAXLEN 1 * m value",
    "XREAD STREAMS served 0",
    "XREAD STREAMS {stream} {id}",
    "XREADGROUP GROUP forage {consumer} COUNT 2 STREAMS {stream} >",
    "XREADGROUP GROUP forage {consumer} COUNT 2 STREAMS {stream} >",
    "XREADGROUP GROUP forage {consumer} COUNT 2 STREAMS {stream} {id}",
    "XACK {stream} forage {id} {id}",
    "XDEL {stream} {id}",
    "XLEN {stream}",
    "XRANGE {stream} {id} {id}",
    "XRANGE {stream} - + COUNT 3",
    "XCLAIM {stream} forage {consumer} 0 {id} {id} JUSTID",
    "XCLAIM {stream} forage {consumer} 0 {id} {id}",
    "XCLAIM {stream} forage {consumer} 100000 {id}",
    "XAUTOCLAIM {stream} forage {consumer} 0 {id} COUNT 2",
    "XAUTOCLAIM {stream} forage {consumer} 100000 0-0 COUNT 2",
    "XPENDING {stream} forage",
    "XPENDING {stream} forage - + 3",
    "XPENDING {stream} forage ({id} + 9 {consumer}",
    "XGROUP DELCONSUMER {stream} forage {consumer}",
    "HGETALL issued:1",
    "HGET policy m",
    "EXISTS {stream} ledger",
    "GET epoch",
    "GET {stream}",
    "INCRBY epoch 1",
    "ZRANGEBYSCORE alive -inf +inf",
)


class Pair:
    """A real server and the simulated one. Ids of entries, which have the time in them, are named by their number."""

    def __init__(self, settings: RedisSettings) -> None:
        self._real = redis.Redis.from_url(settings.url, protocol=2).connection_pool.get_connection()
        self._store = Store(lambda: int(time.time() * 1000))
        self._ids: dict[bool, list[bytes]] = {True: [], False: []}
        self.answered = 0
        assert len({self._ask(is_real, ("FUNCTION LOAD", build_library().code)) for is_real in (True, False)}) == 1

    @property
    def count(self) -> int:
        return len(self._ids[True])

    def run(self, *command: Any) -> None:
        """Run a command on both; integers in a list stand for ids."""
        self._compare(command, [self._ask(is_real, command) for is_real in (True, False)])

    def run_script(self, name: str, keys: list[str], arguments: list[Any]) -> None:
        self.run("FCALL_RO" if is_read_only(name) else "FCALL", name_function(name), len(keys), *keys, *arguments)

    def _ask(self, is_real: bool, command: tuple[Any, ...]) -> Any:
        ids = self._ids[is_real]
        words = [ids[word[0]] if isinstance(word, list) else word for word in command]
        try:
            if not is_real:
                return self._store.execute(*words)
            name, *rest = words
            self._real.send_command(*str(name).split(), *rest)
            return self._real.read_response()
        except redis.ResponseError as error:
            return error

    def _compare(self, command: tuple[Any, ...], answers: list[Any]) -> None:
        for is_real, answer in zip((True, False), answers, strict=True):
            self._learn(is_real, answer)
        if any("XADD" in str(word) or word == "FCALL" for word in command):
            for is_real in (True, False):
                for stream in _STREAMS:
                    self._learn(is_real, self._ask(is_real, ("XRANGE", stream, "-", "+")))
            time.sleep(0.002)  # ids of one server are then different in all streams
        real, simulated = (self._normalize(answer, command) for answer in answers)
        assert real == simulated, command
        self.answered += not isinstance(real, tuple)

    def _learn(self, is_real: bool, answer: Any) -> None:
        ids = self._ids[is_real]
        for found in _ID.findall(repr(answer).encode()):
            if found not in ids:
                ids.append(found)

    def _normalize(self, answer: Any, command: tuple[Any, ...]) -> Any:
        if isinstance(answer, redis.ResponseError):
            text = str(answer)
            code = next((code for code in ("NOGROUP", "BUSYGROUP", "WRONGTYPE", "FENCED") if code in text), text)
            return ("error", code)
        if command[0] == "ZRANGEBYSCORE" or name_function("read_replicas") in command:
            answer = sorted(answer, key=repr)  # by seconds, of which one may end between the two servers
        text = repr(answer).encode()
        for ids in self._ids.values():
            for number, id in enumerate(ids):
                text = text.replace(id, b"#%d" % number)
        if command[0] == "XPENDING" and len(command) > 3:
            text = re.sub(rb"(b'[ab]'), \d+, ", rb"\1, idle, ", text)
        return text


@pytest.mark.parametrize("seed", range(3))
def test_random_commands_are_answered_as_by_a_real_server(redis_server: RedisSettings, seed: int) -> None:
    draw, pair = random.Random(seed), Pair(redis_server)
    fill: dict[str, Callable[[], Any]] = {
        "{stream}": lambda: draw.choice(_STREAMS),
        "{consumer}": lambda: draw.choice(_CONSUMERS),
        "{id}": lambda: [draw.randrange(pair.count)] if pair.count else "1-1",
        "{step}": lambda: draw.randint(1, 3),
        "{epoch}": lambda: draw.choice((0, 1000)),
        "{position}/0": lambda: f"{draw.randint(0, 5)}/0",
    }

    def complete(words: list[Any]) -> list[Any]:
        return [fill[word]() if word in fill else word for word in words]

    for _ in range(600):
        kind = draw.random()
        if kind < 0.6:
            pair.run(*complete(draw.choice(COMMANDS).replace("({id}", "(1-1").split()))
        elif kind < 0.8:
            name = draw.choice(list(SCRIPTS))
            keys, arguments = SCRIPTS[name]
            pair.run_script(name, complete(keys), complete(arguments))
        else:
            name = draw.choice(list(FENCED))
            keys, arguments = FENCED[name]
            pair.run_script(name, complete(keys), [draw.randint(0, 300), *complete(arguments)])
    assert pair.answered > 350
