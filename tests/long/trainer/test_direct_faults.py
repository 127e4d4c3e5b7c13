"""Processes of the direct transport that are killed and stopped in the middle of transfers."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from direct_processes import STALL_S, Start, begin_all, occupy, pool, start, wait_for_resources, write

__all__ = ["pool", "start"]
LARGE = 100 << 20
SMALL_PIECES = 1 << 16
"""Bytes of a file, and of its pieces, whose transfer takes long enough to be interrupted."""


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
    trainer, engines = start("trainer", piece_bytes=SMALL_PIECES), [start("engine") for _ in range(3)]
    trainer.ask(offer={"w": str(source)})
    targets = begin_all(engines, trainer, source)
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
    at_once = engines[1].read()
    assert "stopped sending a moment ago" in at_once["failure"]
    assert at_once["seconds"] < STALL_S
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
    began = time.monotonic()
    target = engines[3].folder / "1" / "w"
    if engines[3].read()["failure"]:
        assert time.monotonic() - began < 5 * STALL_S
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
    assert trainer.ask(outcomes=True) == {"sent nccl": 1}
    engine.begin(trainer.hello["port"], source)
    engine.wait_for_bytes(LARGE // 20)
    engine.kill()
    late = start("engine", stall_s=30.0)
    assert late.receive(trainer, source).read_bytes() == source.read_bytes()
    assert trainer.ask(outcomes=True) == {"sent nccl": 1, "failed nccl": 1, "sent gloo": 1}
