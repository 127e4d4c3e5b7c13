"""The engine's side of the direct transport: files of a policy, received from the trainer or another engine.

A transfer runs in a thread of its own. Every step has a time limit, but calls of a store whose process is stopped have
none in torch: such a thread is left behind, and ends when its connection does. Until then nothing else is asked of
that sender.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile
from forage_runtime.addresses import join_address, split_address
from forage_runtime.errors import UserError
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting
from forage_weights.announcement import list_files
from forage_weights.cache import CachedPolicy
from forage_weights.direct import (
    MOST_TRANSFERS,
    NCCL,
    RECEIVER,
    REQUESTS,
    STALL_S,
    Answer,
    DirectError,
    TransferRequest,
    decode_answer,
    name_answer,
    name_end,
    shorten_error,
    split_pieces,
)
from forage_weights.direct_sender import DirectSender
from forage_weights.pair import Pair, find_gpu, overlap

_CONNECT_S = 2.0
_SLOWEST = 20e6
"""Bytes a second: a slower transfer is given up."""
_AVOID_STALLS = 3
"""For so many times the longest wait for a piece nothing is asked of a sender that kept silent so long."""
_AGAIN_S = (0.05, 1.0)
"""Shortest and longest pause before a busy sender is asked again."""


class DirectReceiver:
    """Receives files from trainers, and sends them on.

    Args:
        stall_s: longest wait for the next piece.
        most: engines that get files from here at once; 0: none.
    """

    def __init__(self, stall_s: float = STALL_S, most: int = MOST_TRANSFERS) -> None:
        self._stall_s, self._most = stall_s, most
        self._left_behind: list[_Transfer] = []
        self._avoided: dict[tuple[str, int], float] = {}
        self._sender: DirectSender | None = None
        self._gpu: str | None = None

    def receive(self, policy: Policy, files: Sequence[PolicyFile], folder: Path) -> None:
        """Receive files of a policy, by their announced digests and sizes, into a folder; they are not verified.

        Raises:
            DirectError: it failed; what the folder contains then is of no use.
        """
        address = (policy.direct.host, policy.direct.port)
        if unusable := [file.name for file in files if not file.bytes or file.name != Path(file.name).name]:
            raise DirectError(f"{unusable[0]!r} has no announced size, or no plain name")
        if self._is_avoided(address):
            raise DirectError("{}:{} stopped sending a moment ago".format(*address))
        with tempfile.TemporaryDirectory(prefix=".direct-", dir=folder) as own:
            if self._gpu is None:
                self._gpu = find_gpu()  # now that the engine's processes have been forked
            serves = self._open_sender(address)
            transfer = _Transfer(address, files, Path(own), self._stall_s, serves, self._gpu, self._is_avoided)
            try:
                self._run(transfer)
            finally:
                self._gpu = transfer.gpu
            for file in files:
                (Path(own) / file.name).rename(folder / file.name)

    def offer(self, policy: Policy, held: CachedPolicy) -> None:
        """Send what is here of a policy and its deltas to engines that the trainer sends here. Files may be patched."""
        if self._sender is None:
            return
        found = {file.digest: path for file, path in zip(list_files(policy).values(), held.files, strict=True)}
        deltas = {delta.content: delta.files for delta in held.deltas}
        for part in policy.parts[1:]:
            paths = deltas.get(part.content, ())
            found |= {file.digest: path for file, path in zip(part.files, paths, strict=False)}
        self._sender.offer(found)

    def _open_sender(self, trainer: tuple[str, int]) -> str:
        """Where other engines get what this one has received; empty: nowhere."""
        if self._sender is None and self._most:
            with contextlib.suppress(OSError, UserError, RuntimeError):
                with socket.create_connection(trainer, _CONNECT_S) as probe:
                    own = probe.getsockname()[0]
                self._sender = DirectSender(
                    join_address(own, 0), stall_s=self._stall_s, most=self._most, is_patched=True
                )
                atexit.register(self._sender.close)  # its threads must not be in torch when the interpreter ends
        return "" if self._sender is None else join_address(self._sender.host, self._sender.port)

    def _is_avoided(self, address: tuple[str, int]) -> bool:
        self._left_behind = [one for one in self._left_behind if one.is_alive()]
        is_stuck = any(one.asked == address for one in self._left_behind)
        return is_stuck or time.monotonic() < self._avoided.get(address, 0.0)

    def _run(self, transfer: _Transfer) -> None:
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
            transfer.is_given_up.set()
            self._left_behind.append(transfer)
        elif not transfer.failure:
            return
        if time.monotonic() - transfer.renewed >= self._stall_s:
            self._avoided = {transfer.asked: time.monotonic() + _AVOID_STALLS * self._stall_s}
        raise DirectError("{}:{}: {}".format(*transfer.asked, transfer.failure or "it has stopped sending"))


class _Transfer(threading.Thread):
    """One transfer.

    Attributes:
        asked: the address of the sender that is asked, at first the trainer's.
        gpu: as in `TransferRequest`; it becomes empty when NCCL fails.
        renewed: when there was progress.
        failure: why it failed; empty: it succeeded, or goes on.
        is_given_up: nobody waits for it: it writes no more.
    """

    def __init__(
        self,
        trainer: tuple[str, int],
        files: Sequence[PolicyFile],
        folder: Path,
        stall_s: float,
        serves: str,
        gpu: str,
        is_avoided: Callable[[tuple[str, int]], bool],
    ) -> None:
        super().__init__(name="direct-receive", daemon=True)
        self.asked = trainer
        self.bytes = sum(file.bytes for file in files)
        self.gpu = gpu
        self.renewed = time.monotonic()
        self.failure = ""
        self.is_given_up = threading.Event()
        self._trainer, self._files, self._folder, self._serves = trainer, files, folder, serves
        self._is_avoided = is_avoided
        self._limit = timedelta(seconds=stall_s)

    def run(self) -> None:
        try:
            self._receive()
        except Exception as error:  # noqa: BLE001 - torch, the network and the disk have many
            self.failure = shorten_error(error)

    def _receive(self) -> None:
        """Receive the files from the trainer, or, while that is busy, from an engine that it names."""
        own, store = self._connect(self._trainer)
        failed: list[str] = []
        pause_s, longest_s = _AGAIN_S
        while True:
            request, answer = self._ask(store, failed)
            if not answer.is_busy:
                try:
                    return self._write_pieces(store, own, request, answer)
                except Exception as error:
                    if answer.backend != NCCL:
                        raise
                    self.gpu = ""
                    get_logger().warning("direct_nccl_given_up", reason=shorten_error(error))
                    continue
            if answer.peer and self._receive_from(answer.peer, failed):
                store.queue_push(REQUESTS, self._make_request(failed, is_done=True).encode())
                return None
            if self.is_given_up.wait(pause_s):  # wait: as long as the trainer is busy; the caller gives up
                raise InterruptedError("given up")
            pause_s = min(longest_s, 1.5 * pause_s)

    def _receive_from(self, peer: str, failed: list[str]) -> bool:
        """Whether an engine has sent the files; where it failed, its name is added to those that have."""
        address = split_address(peer)
        if self._is_avoided(address):
            failed.append(peer)
            return False
        self.asked = address
        try:
            own, store = self._connect(address)
            request, answer = self._ask(store, [])
            if answer.is_busy:
                return False
            self._write_pieces(store, own, request, answer)
            return True
        except _RefusedError:
            return False  # it does not have them yet, or any more
        except Exception as error:  # noqa: BLE001 - the trainer has the files, too
            failed.append(peer)
            get_logger().warning("direct_peer_failed", peer=peer, reason=shorten_error(error))
            return False
        finally:
            if not self.is_given_up.is_set():
                self.asked = self._trainer

    def _connect(self, address: tuple[str, int]) -> tuple[str, dist.Store]:
        """The store of a sender, and the address of this machine from which it is reached."""
        # Fails at once where nobody listens, where the store would try again until its time limit.
        with socket.create_connection(address, _CONNECT_S) as probe:
            own = str(probe.getsockname()[0])
        store = dist.TCPStore(*address, None, False, self._limit, wait_for_workers=False)
        self.renewed = time.monotonic()
        return own, store

    def _ask(self, store: dist.Store, failed: Sequence[str]) -> tuple[TransferRequest, Answer]:
        request = self._make_request(failed)
        store.queue_push(REQUESTS, request.encode())
        answer = decode_answer(store.get(name_answer(request.uid)))
        self.renewed = time.monotonic()
        if answer.refused:
            raise _RefusedError(f"refused: {answer.refused}")
        return request, answer

    def _make_request(self, failed: Sequence[str], is_done: bool = False) -> TransferRequest:
        files = tuple((file.digest, file.bytes) for file in self._files)
        return TransferRequest(uuid.uuid4().hex, files, self._serves, self.gpu, tuple(failed), is_done)

    def _write_pieces(self, store: dist.Store, own: str, request: TransferRequest, answer: Answer) -> None:
        sizes = [file.bytes for file in self._files]
        piece_bytes = min(answer.piece_bytes, max(sizes))
        pair = Pair(answer.backend, dist.PrefixStore(request.uid, store), RECEIVER, own, self._limit, piece_bytes)
        self.renewed = time.monotonic()
        with contextlib.ExitStack() as opened:
            opened.callback(pair.close)
            files = []
            for file in self._files:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                files.append(os.open(self._folder / file.name, flags, 0o644))
                opened.callback(os.close, files[-1])

            def write(lane: int, piece: tuple[int, int, int]) -> None:
                file, at, size = piece
                pair.finish(lane)
                self.renewed = time.monotonic()
                if self.is_given_up.is_set():
                    raise InterruptedError("given up")
                _write_all(files[file], pair.views[lane][:size], at)

            overlap(split_pieces(sizes, answer.piece_bytes), lambda lane, piece: pair.receive(lane, piece[2]), write)
            store.set(name_end(request.uid), b"")


class _RefusedError(ValueError):
    """The sender does not have the files."""


def _write_all(file: int, view: memoryview, begin: int) -> None:
    while view:
        written = os.pwrite(file, view, begin)
        view, begin = view[written:], begin + written
