"""The sender of the direct transport: files of policies, sent to every engine that asks for them.

The trainer has one, and so has each engine that has received files: a sender that is busy names those, so that no
single network card carries all copies. Each transfer has a thread and a group of two, with a time limit on every step.
So an engine that leaves, joins or stops holds up no other one, and never the training. What is sent is read from the
files, and an engine that gets nothing reads them itself.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from forage_runtime.addresses import listen, split_address
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import idling
from forage_weights.direct import (
    GLOO,
    MOST_TRANSFERS,
    NCCL,
    REQUESTS,
    SENDER,
    STALL_S,
    Answer,
    TransferRequest,
    decode_request,
    name_answer,
    name_end,
    shorten_error,
    split_pieces,
)
from forage_weights.pair import Pair, find_gpu, overlap

PIECE_BYTES = 8 << 20
_LOOK_S = 0.02
"""Pause between two looks for requests."""
_FORGET_S = 2 * STALL_S
"""How long the keys of a transfer stay: its engine may still read them."""


class DirectSender:
    """A store that engines ask for transfers, and the threads that send.

    Attributes:
        host: where engines reach the store.
        port: its port.
    """

    def __init__(
        self,
        address: str,
        piece_bytes: int = PIECE_BYTES,
        stall_s: float = STALL_S,
        most: int = MOST_TRANSFERS,
        uses_gpu: bool = False,
        is_patched: bool = False,
        count: Callable[[str, str, int], None] = lambda outcome, backend, size: None,
    ) -> None:
        """
        Args:
            address: "host:port" of this machine as engines reach it; port 0: one that is free.
            stall_s: longest wait for an engine.
            most: transfers at once; the next engines ask another one, or wait.
            uses_gpu: with engines that can, NCCL carries the pieces.
            is_patched: files lose their name, and change after that, even while they are sent.
            count: told how each request ended ("sent", "busy", "refused", "failed"), what carried it, and its bytes.

        Raises:
            UserError: the address is not of this machine, or in use.
        """
        listener = listen(address)
        self.host, self.port = split_address(address)[0], listener.getsockname()[1]
        self._piece_bytes, self._most, self._is_patched, self._count = piece_bytes, most, is_patched, count
        self._gpu = find_gpu() if uses_gpu else ""
        self._limit = timedelta(seconds=stall_s)
        self._store = dist.TCPStore(
            self.host,
            self.port,
            None,
            True,
            self._limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._files: Mapping[str, Path] = {}
        self._peers: dict[str, frozenset[str]] = {}
        self._running: dict[str, threading.Thread] = {}
        self._ended: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        own = (self._store.clone(),)
        self._receptionist = threading.Thread(
            target=self._answer_requests, args=own, name="direct-requests", daemon=True
        )
        self._receptionist.start()

    def offer(self, files: Mapping[str, Path]) -> None:
        """Send these files, by digest, to who asks from now on, and no others; running transfers go on."""
        with self._lock:
            self._files, self._peers = dict(files), {}

    def count_running(self) -> int:
        """Count the transfers in progress."""
        return len(self._list_running())

    def close(self) -> None:
        """End: running transfers may take one more piece, new ones are not begun."""
        self._closing.set()
        deadline = time.monotonic() + self._limit.total_seconds()
        for thread in (self._receptionist, *self._list_running()):
            thread.join(max(0.0, deadline - time.monotonic()))
        del self._store

    def _list_running(self) -> list[threading.Thread]:
        with self._lock:
            return list(self._running.values())

    def _answer_requests(self, store: dist.Store) -> None:
        with idling("requests of engines for a policy", on="rollout"):
            # Polled: torch writes a warning whenever a wait in its store reaches a time limit.
            while not self._closing.wait(_LOOK_S):
                try:
                    while True:
                        self._begin(store, decode_request(store.queue_pop(REQUESTS, False)))
                except dist.QueueEmptyError:
                    pass
                except ValueError as error:
                    self._count("refused", "", 0)
                    get_logger().warning("direct_request_refused", reason=str(error))

    def _begin(self, store: dist.Store, request: TransferRequest) -> None:
        """Start a transfer, or send the engine elsewhere."""
        if request.is_done:
            self._remember(request)
            return
        thread = threading.Thread(target=self._serve, args=(request,), name=f"direct-{request.uid[:8]}", daemon=True)
        digests = {digest for digest, _ in request.files}
        with self._lock:
            if request.uid in self._running:
                return
            for failed in request.failed:
                self._peers.pop(failed, None)
            is_busy = len(self._running) >= self._most and digests <= self._files.keys()
            peers = [peer for peer, has in self._peers.items() if digests <= has and peer != request.serves]
            if not is_busy:
                self._running[request.uid] = thread
        if is_busy:
            # Any of them: one that is busy itself says so, and the engine asks here again.
            peer = random.choice(peers) if peers else ""
            store.set(name_answer(request.uid), Answer(self._piece_bytes, is_busy=True, peer=peer).encode())
            self._count("busy", "", 0)
            self._forget(request.uid)
        else:
            thread.start()

    def _remember(self, request: TransferRequest) -> None:
        """Remember an engine that can send the files of a request from now on."""
        digests = frozenset(digest for digest, _ in request.files)
        with self._lock:
            if request.serves and digests <= self._files.keys():
                self._peers[request.serves] = self._peers.get(request.serves, frozenset()) | digests

    def _serve(self, request: TransferRequest) -> None:
        began = time.perf_counter()
        size = sum(size for _, size in request.files)
        backend = NCCL if self._gpu and request.gpu not in ("", self._gpu) else GLOO
        try:
            store = self._store.clone()
            with ExitStack() as opened:
                try:
                    files = self._open(request, opened)
                except (LookupError, OSError) as error:
                    self._count("refused", "", 0)
                    store.set(name_answer(request.uid), Answer(self._piece_bytes, refused=str(error)).encode())
                    get_logger().warning("direct_transfer_refused", reason=str(error))
                    return
                store.set(name_answer(request.uid), Answer(self._piece_bytes, backend=backend).encode())
                self._send(store, request, files, backend)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must end this transfer only
            self._count("failed", backend, size)
            get_logger().warning("direct_transfer_failed", bytes=size, backend=backend, reason=shorten_error(error))
            if backend == NCCL:
                self._gpu = ""
                get_logger().warning("direct_nccl_given_up", detail="gloo carries all later transfers")
        else:
            self._remember(request)
            self._count("sent", backend, size)
            seconds = round(time.perf_counter() - began, 3)
            get_logger().info("policy_sent", bytes=size, backend=backend, seconds=seconds)
        finally:
            self._forget(request.uid)

    def _open(self, request: TransferRequest, opened: ExitStack) -> list[tuple[int, Path]]:
        """Open the files of a request: they stay readable if they are deleted meanwhile.

        Raises:
            LookupError: a file is not offered.
            OSError: a file cannot be read.
        """
        offered, files = self._files, []
        for digest, size in request.files:
            if digest not in offered:
                raise LookupError(f"the file {digest[:19]}… is not offered")
            file = os.open(offered[digest], os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, file)
            if (found := os.fstat(file).st_size) != size:
                raise LookupError(f"the file {digest[:19]}… has {found} bytes, {size} were asked for")
            files.append((file, offered[digest]))
        return files

    def _send(
        self, store: dist.Store, request: TransferRequest, files: Sequence[tuple[int, Path]], backend: str
    ) -> None:
        sizes = [size for _, size in request.files]
        piece_bytes = min(self._piece_bytes, max(sizes))
        pair = Pair(backend, dist.PrefixStore(request.uid, store), SENDER, self.host, self._limit, piece_bytes)

        def begin(lane: int, piece: tuple[int, int, int]) -> None:
            file, at, size = piece
            if self._closing.is_set():
                raise InterruptedError("the sender ends")
            self._read(*files[file], pair.views[lane][:size], at)
            pair.send(lane, size)

        try:
            overlap(split_pieces(sizes, self._piece_bytes), begin, lambda lane, piece: pair.finish(lane))
            # What has left this process may still be on its way, and would be lost with the group.
            store.wait([name_end(request.uid)], self._limit)  # wait: has a time limit
        finally:
            pair.close()

    def _read(self, file: int, path: Path, view: memoryview, begin: int) -> None:
        """Read as many bytes as the view has.

        Raises:
            OSError: the file cannot be read, has become shorter, or is being patched.
        """
        _read_all(file, view, begin)
        if self._is_patched and not os.path.samestat(os.fstat(file), path.stat()):
            raise OSError("a file has been replaced while it was sent")

    def _forget(self, uid: str) -> None:
        """End a transfer, and delete the keys of those that ended a while ago: the store outlives all of them."""
        now = time.monotonic()
        with self._lock:
            self._running.pop(uid, None)
            self._ended[uid] = now
            if now - next(iter(self._ended.values())) < 2 * _FORGET_S:
                return  # not for each: all keys are looked at
            old = {one for one, ended in self._ended.items() if ended < now - _FORGET_S}
            for one in old:
                del self._ended[one]
        if not self._closing.is_set():
            for key in self._store.list_keys():
                if key.partition("/")[0] in old:
                    self._store.delete_key(key)


def _read_all(file: int, view: memoryview, begin: int) -> None:
    """Read as many bytes as the view has.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    while view:
        if not (count := os.preadv(file, [view], begin)):
            raise OSError("a file has become shorter while it was sent")
        view, begin = view[count:], begin + count
