"""The direct transport between real processes. Deaths and stops are in tests/nightly/trainer."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from direct_processes import (
    Engine,
    Start,
    announce,
    begin_all,
    offer,
    pool,
    stall_s,
    start,
    wait_for_resources,
    write,
)
from policy_files import Publications
from safetensors.torch import load_file
from trainer_parts import write_model
from waiting import WAIT_S, wait_until

from forage_proto.v1.trajectory_pb2 import Policy
from forage_queue.streams.client import StreamClient
from forage_runtime.errors import UserError
from forage_runtime.retries import Retries
from forage_runtime.settings import RedisSettings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_weights.digests import compute_digest
from forage_weights.trainer.publisher import PolicyStore, Publisher
from forage_weights.trainer.sender_address import open_sender

__all__ = ["pool", "stall_s", "start"]


def test_what_is_not_offered_is_refused_with_the_reason(tmp_path: Path, start: Start) -> None:
    source = write(tmp_path / "source", 1 << 20)
    trainer, engine = start("trainer"), start("engine")
    trainer.ask(offer={"w": str(source), "gone": str(tmp_path / "gone")})
    engine.begin(trainer.hello["port"], source, "unknown")
    assert "the file unknown… is not offered" in engine.read()["failure"]
    engine.begin(trainer.hello["port"], source, "gone")
    assert "No such file" in engine.read()["failure"]
    engine.begin(trainer.hello["port"], write(tmp_path / "other", 5))
    assert "has 1048576 bytes, 5 were asked for" in engine.read()["failure"]
    outside = engine.ask(port=trainer.hello["port"], folder=str(tmp_path), files=[["../w", "w", 1 << 20]])
    assert "no plain name" in outside["failure"]
    assert not (tmp_path.parent / "w").exists()
    trainer.ask(offer={})
    engine.begin(trainer.hello["port"], source)
    assert "is not offered" in engine.read()["failure"]


def test_engines_hold_whole_policies_and_deltas_that_were_sent(tmp_path: Path, start: Start) -> None:
    trainer, engines = start("trainer"), [start("engine") for _ in range(2)]
    published = Publications(str(tmp_path / "policies"), tmp_path / "scratch")
    (tmp_path / "sent").mkdir()
    for number in range(3):
        policy = published.publish()
        trainer.ask(offer=offer(policy, tmp_path / "sent"))
        for engine in engines[: 2 if number else 1]:  # one joins late
            engine.order(policy=announce(policy, trainer), cache=str(tmp_path / "cache"))
        answers = [engine.read() for engine in engines[: 2 if number else 1]]
        for answer in answers:
            assert answer["failure"] == ""
            assert [compute_digest(Path(file)) for file in answer["files"]] == [file.digest for file in policy.files]
            assert answer["fallbacks"] == 0
        # The engines of a machine share what one of them has received.
        assert sum(answer["received"] for answer in answers) == number + 1


def test_transfers_use_nccl_only_between_gpus_and_gloo_once_it_has_failed(tmp_path: Path, start: Start) -> None:
    source = write(tmp_path / "source", 1 << 20)
    trainer, engines = start("trainer"), [start("engine") for _ in range(2)]
    wait_until(lambda: trainer.ask(count=True)["running"] == 0)  # of an earlier test
    before = trainer.ask(outcomes=True)

    def read_new() -> dict[str, int]:
        now = trainer.ask(outcomes=True)
        return {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name, 0)}

    def receive(engine: Engine, expected: dict[str, int]) -> None:
        """Receive the file; the trainer counts how it went, once it is done with the engine."""
        assert engine.receive(trainer, source).read_bytes() == source.read_bytes()
        wait_until(lambda: read_new() == expected, lambda: (expected, read_new()))

    trainer.ask(offer={"w": str(source)}, gpu="GPU-0")
    receive(engines[0], {"sent gloo": 1})  # the engine has none
    engines[0].ask(gpu="GPU-0")
    receive(engines[0], {"sent gloo": 2})  # both have the same one
    if not torch.cuda.is_available():
        # Where both claim one and NCCL fails, the same transfer is carried by gloo, and so is every later one.
        engines[0].ask(gpu="GPU-1")
        receive(engines[0], {"sent gloo": 3, "failed nccl": 1})
        trainer.ask(gpu="GPU-0")
        receive(engines[0], {"sent gloo": 4, "failed nccl": 1})  # the engine does not ask for it again
        engines[1].ask(gpu="GPU-1")
        receive(engines[1], {"sent gloo": 5, "failed nccl": 2})
        engines[0].ask(gpu="GPU-1")
        receive(engines[0], {"sent gloo": 6, "failed nccl": 2})  # the trainer does not choose it again


def test_several_engines_and_a_late_one_receive_the_files(tmp_path: Path, start: Start) -> None:
    source, small = write(tmp_path / "source", (33 << 20) + 5), write(tmp_path / "small", 7)
    trainer, engines = start("trainer"), [start("engine") for _ in range(2)]
    before = trainer.ask(offer={"w": str(source), "s": str(small)})
    targets = begin_all(engines, trainer, source)
    assert [engine.read()["failure"] for engine in engines] == [""] * 2
    late = start("engine")
    late.order(
        port=trainer.hello["port"],
        folder=str(tmp_path),
        files=[["first", "s", 7], ["second", "w", (33 << 20) + 5], ["third", "s", 7]],
    )
    assert late.read()["failure"] == ""
    for target in (*targets, tmp_path / "second"):
        assert target.read_bytes() == source.read_bytes()
    assert (tmp_path / "first").read_bytes() == (tmp_path / "third").read_bytes() == small.read_bytes()
    wait_for_resources(trainer, before)
    assert trainer.end()["threads"] < before["threads"]


def test_garbage_to_the_port_harms_nobody(tmp_path: Path, start: Start) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    from forage_weights.direct import REQUESTS

    source = write(tmp_path / "source", 20 << 20)
    trainer, engine = start("trainer"), start("engine")
    trainer.ask(offer={"w": str(source)})
    port = trainer.hello["port"]
    silent = socket.create_connection(("127.0.0.1", port))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), bytes(1000)):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(garbage)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=WAIT_S), wait_for_workers=False)
    nested = b"[" * 100_000
    for request in (b"", b"\xff", b"{}", b"[]", b'{"protocol": 2, "uid": "../x", "files": []}', nested, bytes(2 << 20)):
        store.queue_push(REQUESTS, request)
    store.queue_push(REQUESTS, json.dumps({"protocol": 1, "uid": "0" * 32, "files": [["w", 20 << 20]]}))
    target = engine.begin(port, source)
    assert engine.read()["failure"] == ""
    assert target.read_bytes() == source.read_bytes()
    silent.close()


def test_what_is_not_received_is_read_and_counted(tmp_path: Path, start: Start) -> None:
    trainer, engine = start("trainer"), start("engine")
    published = Publications(str(tmp_path / "policies"), tmp_path / "scratch")
    lies = tmp_path / "lies"

    def hold(policy: Policy, cache: str = "cache") -> dict[str, Any]:
        answer = dict(engine.ask(policy=announce(policy, trainer), cache=str(tmp_path / cache)))
        assert answer["failure"] == ""
        assert [compute_digest(Path(file)) for file in answer["files"]] == [file.digest for file in policy.files]
        return answer

    policy = published.publish()
    assert (hold(policy)["received"], hold(policy)["fallbacks"]) == (0, 1)  # the trainer refuses
    [file, other] = policy.files
    lies.write_bytes(bytes(file.bytes))
    trainer.ask(offer={file.digest: str(lies), other.digest: f"{policy.uri}/{other.name}"})
    assert (hold(policy, "other")["received"], hold(policy, "other")["fallbacks"]) == (0, 1)  # other bytes
    policy = published.publish()
    trainer.kill()
    answer = hold(policy)  # at once: the limit of a transfer is an hour
    assert (answer["received"], answer["fallbacks"]) == (0, 2)


def test_what_the_trainer_publishes_is_sent_by_it(tmp_path: Path, start: Start, redis_server: RedisSettings) -> None:
    settings = load_settings(
        overrides=["rollout.weights.transport=direct", f"redis.url={redis_server.url}"], environ={}
    )
    retries, streams = Retries(Stop(), Health()), StreamClient(redis_server, "run", WAIT_S)
    write_model(tmp_path / "model")
    store = PolicyStore(tmp_path / "policies", "", "run", retries.storage)
    sender = open_sender(settings)
    assert sender is not None
    publisher = Publisher(store, tmp_path / "model", streams, settings.trainer.publish, retries, sender)
    engine = start("engine")
    weights = {"w": torch.zeros(100_000)}
    for number in range(1, 4):
        weights = {"w": weights["w"].clone()}
        weights["w"][number] = number
        publisher.publish(number, weights)
        announced = streams.read_policy()
        assert announced is not None
        assert (announced.direct.host, bool(announced.parts)) == ("127.0.0.1", number > 1)
        if number == 3:
            publisher.close()
        answer = engine.ask(policy=announced.SerializeToString().hex(), cache=str(tmp_path / "cache"))
        assert torch.equal(load_file(answer["files"][0])["w"], weights["w"])
        assert (answer["received"], answer["fallbacks"]) == (min(number, 2), max(number - 2, 0))


def test_only_a_run_with_the_transport_has_a_sender_and_its_address_must_be_one(
    free_address: Callable[[], str],
) -> None:
    assert open_sender(load_settings(environ={})) is None
    direct, port = "rollout.weights.transport=direct", free_address().rpartition(":")[2]
    sender = open_sender(load_settings(overrides=[direct, f"trainer.publish.direct_address=:{port}"], environ={}))
    assert sender is not None
    assert (sender.host, sender.port) == ("127.0.0.1", int(port))
    sender.close()
    with pytest.raises(UserError, match="name the address that engines connect to"):
        open_sender(load_settings(overrides=[direct, "trainer.publish.direct_address=0.0.0.0:0"], environ={}))
    with pytest.raises(UserError, match=r"set trainer\.publish\.direct_address"):
        open_sender(load_settings(overrides=[direct, "redis.url=redis://no.such.host.invalid:1/0"], environ={}))
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:0"):
        open_sender(load_settings(overrides=[direct, "trainer.publish.direct_address=192.0.2.1:0"], environ={}))
