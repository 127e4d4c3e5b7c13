"""The direct transport between real processes: a trainer and engines, killed and stopped in the middle of transfers."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_files import Publications
from safetensors.torch import load_file
from trainer_parts import write_model

from forage_common.errors import UserError
from forage_common.settings import RedisSettings, load_settings
from forage_common.stop import Stop
from forage_common.streams.client import StreamClient
from forage_common.telemetry.health import Health
from forage_common.v1.trajectory_pb2 import Policy, PolicyPart
from forage_policies.digests import compute_digest
from forage_trainer.waiting import RedisRetry
from forage_trainer.weights.direct_sender import open_sender
from forage_trainer.weights.policy_store import PolicyStore
from forage_trainer.weights.publisher import Publisher

STALL_S = 2.0
SOON_S = 30.0
"""Long enough on a busy machine, for what takes a second on an idle one."""
LARGE = 200 << 20
"""Bytes whose transfer takes long enough to be interrupted."""


class Process:
    """A process that obeys lines of JSON, one answer each."""

    def __init__(self, python: Path, script: Path) -> None:
        command = [str(python if python.exists() else sys.executable), str(script), str(STALL_S)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        self.hello = self.read(120)

    def order(self, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")
        self._process.stdin.flush()

    def read(self, limit_s: float = SOON_S) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], limit_s)[0], f"nothing within {limit_s} s"
        return dict(json.loads(self._process.stdout.readline()))

    def ask(self, **fields: Any) -> dict[str, Any]:
        self.order(**fields)
        return self.read()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        last = self.read()
        assert self._process.wait(SOON_S) == 0
        return last

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(SOON_S)


class Engine(Process):
    """An engine that receives into a folder of its own."""

    def __init__(self, repository: Path, folder: Path) -> None:
        super().__init__(repository / ".venvs/rollout/bin/python", repository / "tests/support/direct_engine.py")
        self.folder = folder
        self._transfers = 0

    def begin(self, port: int, source: Path, name: str = "w") -> Path:
        """Ask for a file under the digest `name`; returns where it will be."""
        self._transfers += 1
        folder = self.folder / str(self._transfers)
        folder.mkdir(parents=True)
        self.order(port=port, folder=str(folder), files=[["w", name, source.stat().st_size]])
        return folder / "w"

    def wait_for_bytes(self, count: int = LARGE // 20) -> None:
        """Return once the transfer that was begun last is in its middle."""
        folder, deadline = self.folder / str(self._transfers), time.monotonic() + SOON_S
        while not any(file.stat().st_size > count for file in folder.glob(".direct-*/w")):
            assert time.monotonic() < deadline
            time.sleep(0.0005)


@pytest.fixture
def start(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    started: list[Process] = []

    def start_one(kind: str) -> Process:
        if kind == "trainer":
            process = Process(Path(sys.executable), repository / "tests/support/direct_trainer.py")
        else:
            process = Engine(repository, tmp_path / f"engine-{len(started)}")
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()


def write(file: Path, size: int = LARGE) -> Path:
    """A file whose pieces differ from each other."""
    block = os.urandom(1 << 20)
    with file.open("wb") as out:
        for number in range(size >> 20):
            out.write(number.to_bytes(8, "little") + block[8:])
        out.write(block[: size % (1 << 20)])
    return file


def test_several_engines_and_a_late_one_receive_the_files(tmp_path: Path, start: Callable[..., Any]) -> None:
    source, small = write(tmp_path / "source", (33 << 20) + 5), write(tmp_path / "small", 7)
    trainer, engines = start("trainer"), [start("engine") for _ in range(3)]
    before = trainer.ask(offer={"w": str(source), "s": str(small)})
    targets = [engine.begin(trainer.hello["port"], source) for engine in engines]
    assert [engine.read()["failure"] for engine in engines] == [""] * 3
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_stops_holds_up_no_other(
    tmp_path: Path, start: Callable[..., Any], number: signal.Signals
) -> None:
    source = write(tmp_path / "source")
    trainer, engines = start("trainer"), [start("engine") for _ in range(3)]
    before = trainer.ask(offer={"w": str(source)})
    targets = [engine.begin(trainer.hello["port"], source) for engine in engines]
    engines[0].wait_for_bytes()
    engines[0].signal(number)
    for engine, target in zip(engines[1:], targets[1:], strict=True):
        assert engine.read()["failure"] == ""
        assert target.read_bytes() == source.read_bytes()
    assert not targets[0].exists()
    if number is signal.SIGSTOP:
        # While it stands still, a connection to the store is all that is left of it.
        wait_for_resources(trainer, before | {"files": before["files"] + 1})
        engines[0].signal(signal.SIGCONT)
        assert engines[0].read()["failure"]
    wait_for_resources(trainer, before)
    if number is signal.SIGSTOP:
        assert receive_again(engines[0], trainer, source).read_bytes() == source.read_bytes()


def receive_again(engine: Engine, trainer: Process, source: Path) -> Path:
    """Receive a file once the trainer is not avoided any more."""
    deadline = time.monotonic() + SOON_S
    while True:
        target = engine.begin(trainer.hello["port"], source)
        if not engine.read()["failure"]:
            return target
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_for_resources(trainer: Process, before: dict[str, int]) -> None:
    """Return once the trainer has no more threads, files and sockets than before."""
    deadline = time.monotonic() + SOON_S
    while (now := trainer.ask(count=True)) != before:
        assert time.monotonic() < deadline, now
        time.sleep(0.05)


def test_a_trainer_that_dies_fails_every_transfer_at_once(tmp_path: Path, start: Callable[..., Any]) -> None:
    source = write(tmp_path / "source")
    trainer, engines = start("trainer"), [start("engine") for _ in range(3)]
    trainer.ask(offer={"w": str(source)})
    targets = [engine.begin(trainer.hello["port"], source) for engine in engines]
    for engine in engines:
        engine.wait_for_bytes(1)
    trainer.kill()
    killed = time.monotonic()
    assert all(engine.read()["failure"] for engine in engines)
    assert time.monotonic() - killed < 2 * STALL_S
    assert not any(target.exists() or list(target.parent.iterdir()) for target in targets)
    engines[0].begin(trainer.hello["port"], source)
    refused = engines[0].read()
    assert "ConnectionRefusedError" in refused["failure"]
    assert refused["seconds"] < STALL_S


def test_a_trainer_that_stops_is_given_up_and_taken_again(tmp_path: Path, start: Callable[..., Any]) -> None:
    source = write(tmp_path / "source")
    trainer, engines = start("trainer"), [start("engine") for _ in range(2)]
    trainer.ask(offer={"w": str(source)})
    engines[0].begin(trainer.hello["port"], source)
    engines[0].wait_for_bytes()
    trainer.signal(signal.SIGSTOP)
    assert engines[0].read()["failure"]
    engines[1].begin(trainer.hello["port"], source)
    assert "has stopped sending" in engines[1].read()["failure"]
    engines[1].begin(trainer.hello["port"], source)
    at_once = engines[1].read()
    assert "stopped sending a moment ago" in at_once["failure"]
    assert at_once["seconds"] < STALL_S
    trainer.signal(signal.SIGCONT)
    assert receive_again(engines[1], trainer, source).read_bytes() == source.read_bytes()


def test_what_is_not_offered_is_refused_with_the_reason(tmp_path: Path, start: Callable[..., Any]) -> None:
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


def test_garbage_to_the_port_harms_nobody(tmp_path: Path, start: Callable[..., Any]) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    from forage_policies.direct import REQUESTS

    source = write(tmp_path / "source", 20 << 20)
    trainer, engine = start("trainer"), start("engine")
    trainer.ask(offer={"w": str(source)})
    port = trainer.hello["port"]
    silent = socket.create_connection(("127.0.0.1", port))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), bytes(1000)):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(garbage)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=STALL_S), wait_for_workers=False)
    nested = b"[" * 100_000
    for request in (b"", b"\xff", b"{}", b"[]", b'{"protocol": 1, "uid": "../x", "files": []}', nested, bytes(2 << 20)):
        store.queue_push(REQUESTS, request)
    store.queue_push(REQUESTS, json.dumps({"protocol": 1, "uid": "0" * 32, "files": [["w", 20 << 20]]}))
    target = engine.begin(port, source)
    assert engine.read()["failure"] == ""
    assert target.read_bytes() == source.read_bytes()
    silent.close()


def announce(policy: Policy, trainer: Process) -> str:
    """The announcement of a policy that the trainer also sends."""
    policy = Policy.FromString(policy.SerializeToString())
    policy.direct.host, policy.direct.port = "127.0.0.1", trainer.hello["port"]
    return policy.SerializeToString().hex()


def offer(policy: Policy, to: Path) -> dict[str, str]:
    """The files of all parts of a policy, moved to where only the trainer finds them."""
    files = {}
    for part in policy.parts or [PolicyPart(uri=policy.uri, files=policy.files)]:
        for file in part.files:
            target = to / file.digest.rpartition(":")[2]
            source = Path(part.uri) / file.name
            if source.exists():
                source.rename(target)
            files[file.digest] = str(target)
    return files


def test_engines_hold_whole_policies_and_deltas_that_were_sent(tmp_path: Path, start: Callable[..., Any]) -> None:
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


def test_what_is_not_received_is_read_and_counted(tmp_path: Path, start: Callable[..., Any]) -> None:
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
    answer = hold(policy)
    assert (answer["received"], answer["fallbacks"]) == (0, 2)
    assert answer["seconds"] < STALL_S  # at once


def test_what_the_trainer_publishes_is_sent_by_it(
    tmp_path: Path, start: Callable[..., Any], redis_server: RedisSettings
) -> None:
    settings = load_settings(
        overrides=["rollout.weights.transport=direct", f"redis.url={redis_server.url}"], environ={}
    )
    retry, streams = RedisRetry(Stop(), Health()), StreamClient(redis_server, "run", 2.0)
    write_model(tmp_path / "model")
    store = PolicyStore(tmp_path / "policies", "", "run", retry.storage)
    sender = open_sender(settings)
    assert sender is not None
    publisher = Publisher(store, tmp_path / "model", streams, settings.trainer.publish, retry, sender)
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


def test_only_a_run_with_the_transport_has_a_sender_and_its_address_must_be_one() -> None:
    assert open_sender(load_settings(environ={})) is None
    direct = "rollout.weights.transport=direct"
    with pytest.raises(UserError, match="name the address that engines connect to"):
        open_sender(load_settings(overrides=[direct, "trainer.publish.direct_address=0.0.0.0:0"], environ={}))
    with pytest.raises(UserError, match=r"set trainer\.publish\.direct_address"):
        open_sender(load_settings(overrides=[direct, "redis.url=redis://no.such.host.invalid:1/0"], environ={}))
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:0"):
        open_sender(load_settings(overrides=[direct, "trainer.publish.direct_address=192.0.2.1:0"], environ={}))
