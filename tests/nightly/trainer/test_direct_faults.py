"""Processes of the direct transport that are killed and stopped in the middle of transfers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from direct_processes import (
    Process,
    Start,
    announce,
    begin_all,
    occupy,
    offer,
    pool,
    start,
    wait_for_resources,
    write,
)
from policy_files import Publications
from waiting import wait_until

from forage_weights.digests import compute_digest

__all__ = ["pool", "start"]
LARGE = 100 << 20
SMALL_PIECES = 1 << 16
"""Bytes of a file, and of its pieces, whose transfer takes long enough to be interrupted."""


@pytest.fixture
def stall_s() -> float:
    """Short, since tests wait for its end; nothing that goes on stands still for so long."""
    return 5.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_stops_holds_up_no_other(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    source = write(tmp_path / "source", LARGE)
    trainer, engines = start("trainer", piece_bytes=SMALL_PIECES), [start("engine") for _ in range(3)]
    before = trainer.ask(offer={"w": str(source)})
    targets = begin_all(engines, trainer, source)
    engines[0].wait_for_bytes(LARGE // 20)
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
        assert engines[0].receive_soon(trainer, source).read_bytes() == source.read_bytes()


def test_a_trainer_that_dies_fails_every_transfer_at_once(tmp_path: Path, start: Start) -> None:
    source = write(tmp_path / "source", LARGE)
    trainer = start("trainer", piece_bytes=SMALL_PIECES, stall_s=3600.0)
    engines = [start("engine", stall_s=3600.0) for _ in range(3)]
    trainer.ask(offer={"w": str(source)})
    targets = begin_all(engines, trainer, source)
    for engine in engines:
        engine.wait_for_bytes(1)
    trainer.kill()
    assert all(engine.read()["failure"] for engine in engines)  # without the hour that a transfer may stand still
    assert not any(target.exists() or list(target.parent.iterdir()) for target in targets)
    engines[0].begin(trainer.hello["port"], source)
    assert "ConnectionRefusedError" in engines[0].read()["failure"]


def test_a_trainer_that_stops_is_given_up_and_taken_again(tmp_path: Path, start: Start) -> None:
    source = write(tmp_path / "source", LARGE)
    trainer, engines = start("trainer", piece_bytes=SMALL_PIECES), [start("engine") for _ in range(2)]
    trainer.ask(offer={"w": str(source)})
    engines[0].begin(trainer.hello["port"], source)
    engines[0].wait_for_bytes(LARGE // 20)
    trainer.signal(signal.SIGSTOP)
    assert engines[0].read()["failure"]
    engines[1].begin(trainer.hello["port"], source)
    assert "has stopped sending" in engines[1].read()["failure"]
    engines[1].begin(trainer.hello["port"], source)
    assert "stopped sending a moment ago" in engines[1].read()["failure"]
    trainer.signal(signal.SIGCONT)
    assert engines[1].receive_soon(trainer, source).read_bytes() == source.read_bytes()


def test_engines_that_send_may_patch_their_files_stop_and_die(tmp_path: Path, start: Start) -> None:
    source = write(tmp_path / "source", LARGE)
    trainer, engines = start("trainer", most=1, piece_bytes=SMALL_PIECES), [start("engine") for _ in range(4)]
    trainer.ask(offer={"w": str(source)})
    assert [engine.hello for engine in engines]  # what is occupied is so for a moment only
    copy = engines[0].receive(trainer, source)
    engines[0].ask(offer={"w": str(copy)})

    occupy(trainer, source)
    target = engines[1].begin(trainer.hello["port"], source)
    engines[1].wait_for_bytes(LARGE // 20)
    copy.rename(copy.with_name("patched"))
    with copy.with_name("patched").open("r+b") as file:
        file.write(bytes(LARGE))
    assert engines[1].read()["failure"] == ""  # the trainer has sent it, once it could
    assert target.read_bytes() == source.read_bytes()
    engines[1].ask(offer={"w": str(target)})

    occupy(trainer, source)
    target = engines[2].begin(trainer.hello["port"], source)
    engines[2].wait_for_bytes(LARGE // 20)
    engines[1].kill()
    assert engines[2].read()["failure"] == ""
    assert target.read_bytes() == source.read_bytes()
    engines[2].ask(offer={"w": str(target)})

    occupy(trainer, source)
    engines[3].begin(trainer.hello["port"], source)
    engines[3].wait_for_bytes(LARGE // 20)
    engines[2].signal(signal.SIGSTOP)
    target = engines[3].folder / "1" / "w"
    if engines[3].read()["failure"]:
        target = engines[3].receive_soon(trainer, source)
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs: it carries nothing between fewer")
def test_nccl_carries_a_policy_between_two_gpus(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", LARGE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    trainer = start("trainer", uses_gpu=True, stall_s=30.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    engine = start("engine", stall_s=30.0)
    trainer.ask(offer={"w": str(source)})
    assert engine.receive(trainer, source).read_bytes() == source.read_bytes()
    wait_until(lambda: trainer.ask(outcomes=True) == {"sent nccl": 1})
    engine.begin(trainer.hello["port"], source)
    engine.wait_for_bytes(LARGE // 20)
    engine.kill()
    late = start("engine", stall_s=30.0)
    assert late.receive(trainer, source).read_bytes() == source.read_bytes()
    wait_until(lambda: trainer.ask(outcomes=True) == {"sent nccl": 1, "failed nccl": 1, "sent gloo": 1})


def test_a_busy_trainer_names_engines_that_have_the_files(tmp_path: Path, start: Start) -> None:
    trainers = [start("trainer", most=1, stall_s=3600.0) for _ in range(2)]
    engines = [start("engine", stall_s=3600.0) for _ in range(3)]
    published, sent = Publications(str(tmp_path / "policies"), tmp_path / "scratch"), tmp_path / "sent"
    sent.mkdir()

    def receive(engine: Process, trainer: Process) -> bool:
        """Whether an engine, each on a machine of its own, has received the policy."""
        answer = engine.ask(policy=announce(policy, trainer), cache=str(tmp_path / f"cache-{id(engine)}"))
        assert answer["failure"] == ""
        assert [compute_digest(Path(file)) for file in answer["files"]] == [file.digest for file in policy.files]
        return not answer["fallbacks"]

    policy = published.publish()
    files = offer(policy, sent)
    trainers[0].ask(offer=files)
    assert receive(engines[0], trainers[0])
    # What occupies the trainer does that for an hour: the others have the files from an engine.
    occupy(trainers[0], Path(files[policy.files[0].digest]), policy.files[0].digest)
    assert receive(engines[1], trainers[0])
    engines[0].kill()
    assert receive(engines[2], trainers[0])  # from the second one, once the first has failed
    policy = published.publish()
    delta = policy.parts[1].files[0].digest
    files |= offer(policy, sent)
    trainers[1].ask(offer=files)
    assert receive(engines[1], trainers[1])
    occupy(trainers[1], Path(files[delta]), delta)
    assert receive(engines[2], trainers[1])
    for trainer in trainers:
        # It counts a transfer once it is done with the engine.
        wait_until(lambda trainer=trainer: trainer.ask(outcomes=True)["sent gloo"] == 1)
        assert trainer.ask(outcomes=True)["busy"] >= 1
        trainer.kill()  # nothing else ends what occupies it
