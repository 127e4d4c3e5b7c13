"""The trainer's side of the direct transport: files of policies, sent to every engine that asks for them.

Each transfer has a thread and a process group of two, the trainer and one engine, with a time limit on every step. So
an engine that leaves, joins or stops holds up no other one, and never the training. The files stay the truth: what is
sent is read from them, and an engine that gets nothing reads them itself.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from prometheus_client import Counter, Gauge

from forage_common.addresses import listen, split_address
from forage_common.errors import SettingsError, UserError
from forage_common.settings import Settings
from forage_common.telemetry.logs import get_logger
from forage_common.telemetry.waits import idling
from forage_policies.direct import (
    REQUESTS,
    SENDER,
    STALL_S,
    Answer,
    Request,
    decode_request,
    name_answer,
    split_pieces,
)

PIECE_BYTES = 8 << 20
MOST_TRANSFERS = 64
"""Transfers at once; an engine beyond them reads the files."""
SENT = Counter("forage_trainer_direct_bytes_total", "Bytes of policies that the trainer sent to engines itself")
TRANSFERS = Counter(
    "forage_trainer_direct_transfers_total", "Transfers that engines asked the trainer for", labelnames=["outcome"]
)
RUNNING = Gauge("forage_trainer_direct_running", "Transfers to engines in progress")
_SENT_ALL, _REFUSED, _FAILED = (TRANSFERS.labels(outcome) for outcome in ("sent", "refused", "failed"))
_LOOK_S = 0.02
"""Pause between two looks for requests."""
_FORGET_S = 2 * STALL_S
"""How long the keys of a transfer stay: its engine may still read them."""
_ANY_PORT = 9
_DEPTH = 2
"""Pieces of a transfer in memory: one is read while one is sent."""


class DirectSender:
    """A store that engines ask for transfers, and the threads that send.

    Attributes:
        host: where engines reach the store.
        port: its port.
    """

    def __init__(self, address: str, piece_bytes: int = PIECE_BYTES, stall_s: float = STALL_S) -> None:
        """
        Args:
            address: "host:port" of this machine as engines reach it; port 0: one that is free.
            stall_s: longest wait for an engine.

        Raises:
            UserError: the address is not of this machine, or in use.
        """
        listener = listen(address)
        self.host, self.port = split_address(address)[0], listener.getsockname()[1]
        self._piece_bytes = piece_bytes
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
        self._running: dict[str, threading.Thread] = {}
        self._ended: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._receptionist = threading.Thread(target=self._answer_requests, name="direct-requests", daemon=True)
        self._receptionist.start()

    def offer(self, files: Mapping[str, Path]) -> None:
        """Send these files, by digest, to who asks from now on, and no others; running transfers go on."""
        self._files = dict(files)

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

    def _answer_requests(self) -> None:
        store = self._store.clone()
        with idling("requests of engines for a policy", on="rollout"):
            # Polled: torch writes a warning whenever a wait in its store reaches a time limit.
            while not self._closing.wait(_LOOK_S):
                try:
                    while True:
                        self._begin(decode_request(store.queue_pop(REQUESTS, False)))
                except dist.QueueEmptyError:
                    pass
                except ValueError as error:
                    _REFUSED.inc()
                    get_logger().warning("direct_request_refused", reason=str(error))

    def _begin(self, request: Request) -> None:
        thread = threading.Thread(target=self._serve, args=(request,), name=f"direct-{request.uid[:8]}", daemon=True)
        with self._lock:
            if request.uid in self._running:
                return
            self._running[request.uid] = thread
        RUNNING.inc()
        thread.start()

    def _serve(self, request: Request) -> None:
        began = time.perf_counter()
        size = sum(size for _, size in request.files)
        try:
            store = self._store.clone()
            with ExitStack() as opened:
                try:
                    files = self._open(request, opened)
                except (LookupError, OSError) as error:
                    _REFUSED.inc()
                    store.set(name_answer(request.uid), Answer(str(error), self._piece_bytes).encode())
                    get_logger().warning("direct_transfer_refused", reason=str(error))
                    return
                store.set(name_answer(request.uid), Answer("", self._piece_bytes).encode())
                self._send(store, request, files)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must end this transfer only
            _FAILED.inc()
            get_logger().warning("direct_transfer_failed", bytes=size, reason=_shorten(error))
        else:
            _SENT_ALL.inc()
            SENT.inc(size)
            get_logger().info("policy_sent", bytes=size, seconds=round(time.perf_counter() - began, 3))
        finally:
            RUNNING.dec()
            self._forget(request.uid)

    def _open(self, request: Request, opened: ExitStack) -> list[int]:
        """Open the files of a request: they stay readable if they are deleted meanwhile.

        Raises:
            LookupError: a file is not offered, or too many transfers are in progress.
            OSError: a file cannot be read.
        """
        with self._lock:
            if len(self._running) > MOST_TRANSFERS:
                raise LookupError(f"{MOST_TRANSFERS} transfers are in progress")
        offered, files = self._files, []
        for digest, size in request.files:
            if digest not in offered:
                raise LookupError(f"the file {digest[:19]}… is not offered")
            file = os.open(offered[digest], os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, file)
            if (found := os.fstat(file).st_size) != size:
                raise LookupError(f"the file {digest[:19]}… has {found} bytes, {size} were asked for")
            files.append(file)
        return files

    def _send(self, store: dist.Store, request: Request, files: Sequence[int]) -> None:
        group = _join_pair(store, request.uid, self.host, self._limit)
        sizes = [size for _, size in request.files]
        buffers = [torch.empty(min(self._piece_bytes, max(sizes)), dtype=torch.uint8) for _ in range(_DEPTH)]
        views = [memoryview(buffer.numpy()) for buffer in buffers]
        going: deque[dist.Work] = deque()

        def finish_next() -> None:
            going[0].wait()  # wait: has a time limit
            going.popleft()

        try:
            for number, (file, begin, size) in enumerate(split_pieces(sizes, self._piece_bytes)):
                if len(going) == _DEPTH:
                    finish_next()
                if self._closing.is_set():
                    raise InterruptedError("the trainer ends")
                slot = number % _DEPTH
                _read_all(files[file], views[slot][:size], begin)
                going.append(group.send([buffers[slot][:size]], 1 - SENDER, 0))
            while going:
                finish_next()
        finally:
            going.clear()  # while the buffers are still there, which gloo may read

    def _forget(self, uid: str) -> None:
        """End a transfer, and delete the keys of those that ended a while ago: the store outlives all of them."""
        now = time.monotonic()
        with self._lock:
            del self._running[uid]
            self._ended[uid] = now
            old = [one for one, ended in self._ended.items() if ended < now - _FORGET_S]
            for one in old:
                del self._ended[one]
        if old and not self._closing.is_set():
            for key in self._store.list_keys():
                if key.partition("/")[0] in old:
                    self._store.delete_key(key)


def open_sender(settings: Settings) -> DirectSender | None:
    """Open the sender of a run whose engines ask for one.

    Raises:
        UserError: there is no address where they reach it.
    """
    if settings.rollout.weights.transport != "direct":
        return None
    address = settings.trainer.publish.direct_address or f"{_find_own_address(settings.redis.url)}:0"
    if split_address(address)[0] == "0.0.0.0":
        raise SettingsError(f"trainer.publish.direct_address={address}: name the address that engines connect to")
    return DirectSender(address)


def _find_own_address(redis_url: str) -> str:
    """The address of this machine from which it reaches Redis, as engines do."""
    host = urlsplit(redis_url).hostname or "127.0.0.1"
    try:
        target = socket.getaddrinfo(host, _ANY_PORT, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"the address of this machine towards {host} is unknown ({error.strerror}): "
            "set trainer.publish.direct_address"
        ) from None


def _join_pair(store: dist.Store, uid: str, host: str, limit: timedelta) -> dist.ProcessGroupGloo:
    """Connect with the engine of a request.

    The group belongs to nobody else: unlike one of `new_group`, it is none of the trainer's collectives.

    Raises:
        RuntimeError: the engine did not come within the time limit.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = limit
    options._threads = 1
    return dist.ProcessGroupGloo(dist.PrefixStore(uid, store), SENDER, 2, options)


def _read_all(file: int, view: memoryview, begin: int) -> None:
    """Read as many bytes as the view has.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    while view:
        if not (count := os.preadv(file, [view], begin)):
            raise OSError("a file has become shorter while it was sent")
        view, begin = view[count:], begin + count


def _shorten(error: Exception) -> str:
    """The first line of an error of torch, whose message contains a trace of calls."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
