"""The engine's side of the direct transport: files of a policy, received from the trainer.

A transfer runs in a thread of its own. Every step has a time limit, but calls of a store whose process is stopped have
none in torch: such a thread is left behind, and ends when its connection does. Until then nothing else is asked of
that trainer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from forage_common.telemetry.waits import waiting
from forage_common.v1.trajectory_pb2 import Policy, PolicyFile
from forage_policies.direct import (
    RECEIVER,
    REQUESTS,
    STALL_S,
    DirectError,
    Request,
    decode_answer,
    name_answer,
    split_pieces,
)

_CONNECT_S = 2.0
_SLOWEST = 20e6
"""Bytes a second: a slower transfer is given up."""
_AVOID_STALLS = 3
"""For so many times the longest wait for a piece nothing is asked of a trainer that kept silent so long."""
_DEPTH = 2
"""Pieces in memory: one is written while one is received."""


class DirectReceiver:
    """Receives files from trainers.

    Args:
        stall_s: longest wait for the next piece.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._left_behind: list[_Transfer] = []
        self._avoided: dict[tuple[str, int], float] = {}

    def receive(self, policy: Policy, files: Sequence[PolicyFile], folder: Path) -> None:
        """Receive files of a policy, by their announced digests and sizes, into a folder; they are not verified.

        Raises:
            DirectError: it failed; what the folder contains then is of no use.
        """
        address = (policy.direct.host, policy.direct.port)
        name = "{}:{}".format(*address)
        if unusable := [file.name for file in files if not file.bytes or file.name != Path(file.name).name]:
            raise DirectError(f"{unusable[0]!r} has no announced size, or no plain name")
        self._left_behind = [one for one in self._left_behind if one.is_alive()]
        until = self._avoided.get(address, 0.0)
        if any(one.address == address for one in self._left_behind) or time.monotonic() < until:
            raise DirectError(f"{name} stopped sending a moment ago")
        with tempfile.TemporaryDirectory(prefix=".direct-", dir=folder) as own:
            transfer = _Transfer(address, files, Path(own), self._stall_s)
            self._run(transfer)
            for file in files:
                (Path(own) / file.name).rename(folder / file.name)

    def _run(self, transfer: _Transfer) -> None:
        name = "{}:{}".format(*transfer.address)
        began = time.monotonic()
        limit_s = 2 * self._stall_s + transfer.bytes / _SLOWEST
        transfer.start()
        with waiting("files of a policy", on="trainer", limit_s=limit_s):
            while transfer.is_alive():
                left_s = min(began + limit_s, transfer.renewed + self._stall_s + _CONNECT_S) - time.monotonic()
                if left_s <= 0:
                    break
                transfer.join(left_s)
        if transfer.is_alive():
            transfer.is_given_up = True
            self._left_behind.append(transfer)
        elif not transfer.failure:
            return
        if time.monotonic() - transfer.renewed >= self._stall_s:
            self._avoided = {transfer.address: time.monotonic() + _AVOID_STALLS * self._stall_s}
        raise DirectError(f"{name}: {transfer.failure or 'it has stopped sending'}")


class _Transfer(threading.Thread):
    """One transfer.

    Attributes:
        renewed: when there was progress.
        failure: why it failed; empty: it succeeded, or goes on.
        is_given_up: nobody waits for it: it writes no more.
    """

    def __init__(self, address: tuple[str, int], files: Sequence[PolicyFile], folder: Path, stall_s: float) -> None:
        super().__init__(name="direct-receive", daemon=True)
        self.address = address
        self.bytes = sum(file.bytes for file in files)
        self.renewed = time.monotonic()
        self.failure = ""
        self.is_given_up = False
        self._files = files
        self._folder = folder
        self._limit = timedelta(seconds=stall_s)

    def run(self) -> None:
        try:
            self._receive()
        except Exception as error:  # noqa: BLE001 - torch, the network and the disk have many
            lines = str(error).splitlines() or [""]
            self.failure = f"{type(error).__name__}: {lines[0][:160]}"

    def _receive(self) -> None:
        host, port = self.address
        # Fails at once where nobody listens, where the store would try again until its time limit.
        with socket.create_connection(self.address, _CONNECT_S) as probe:
            own = probe.getsockname()[0]
        store = dist.TCPStore(host, port, None, False, self._limit, wait_for_workers=False)
        request = Request(uuid.uuid4().hex, tuple((file.digest, file.bytes) for file in self._files))
        store.queue_push(REQUESTS, request.encode())
        answer = decode_answer(store.get(name_answer(request.uid)))
        if answer.refused:
            raise ValueError(f"refused: {answer.refused}")
        self.renewed = time.monotonic()
        group = _join_pair(store, request.uid, own, self._limit)
        self.renewed = time.monotonic()
        self._write_pieces(group, answer.piece_bytes)

    def _write_pieces(self, group: dist.ProcessGroupGloo, piece_bytes: int) -> None:
        sizes = [file.bytes for file in self._files]
        buffers = [torch.empty(min(piece_bytes, max(sizes)), dtype=torch.uint8) for _ in range(_DEPTH)]
        views = [memoryview(buffer.numpy()) for buffer in buffers]
        coming: deque[tuple[dist.Work, int, memoryview, int]] = deque()

        def write_next() -> None:
            work, file, view, begin = coming[0]
            work.wait()  # wait: has a time limit
            self.renewed = time.monotonic()
            if self.is_given_up:
                raise InterruptedError("given up")
            _write_all(files[file], view, begin)
            coming.popleft()

        with contextlib.ExitStack() as opened:
            opened.callback(coming.clear)  # while the buffers are still there, into which gloo may write
            files = []
            for file in self._files:
                target = os.open(self._folder / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                opened.callback(os.close, target)
                files.append(target)
            for number, (index, begin, size) in enumerate(split_pieces(sizes, piece_bytes)):
                if len(coming) == _DEPTH:
                    write_next()
                slot = number % _DEPTH
                work = group.recv([buffers[slot][:size]], 1 - RECEIVER, 0)
                coming.append((work, index, views[slot][:size], begin))
            while coming:
                write_next()


def _join_pair(store: dist.Store, uid: str, host: str, limit: timedelta) -> dist.ProcessGroupGloo:
    """Connect with the trainer, which has accepted a request.

    Raises:
        RuntimeError: it did not come within the time limit.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = limit
    options._threads = 1
    return dist.ProcessGroupGloo(dist.PrefixStore(uid, store), RECEIVER, 2, options)


def _write_all(file: int, view: memoryview, begin: int) -> None:
    while view:
        written = os.pwrite(file, view, begin)
        view, begin = view[written:], begin + written
