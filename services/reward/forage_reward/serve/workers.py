"""Several worker processes on one port: the kernel deals out connections, this process starts, watches and ends them.

Each worker is a whole server; a long batch is shared with those that have none. Their sockets and metrics are files in
a folder, and this process adds the metrics up.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from forage_common.addresses import port_in_use_error, split_address
from forage_common.errors import UserError
from forage_common.settings import Settings
from forage_common.telemetry.health import WAITING, Health
from forage_common.telemetry.logs import get_logger
from forage_reward.isolation.child import START_TIMEOUT_S, Child, ChildDiedError, ChildTimeoutError
from forage_reward.serve.server import DRAIN_S

_own = CollectorRegistry()
RESTARTS = Counter("forage_reward_worker_restarts_total", "Workers that ended and were started again", registry=_own)
_own.register(WAITING)
_WATCH_S = 0.1
_MAX_DELAY_S = 10.0


class Workers:
    """The workers of one service. `listen` raises UserError where `Server` or its `listen` would."""

    def __init__(self, settings: Settings, health: Health) -> None:
        self._settings = settings
        self._health = health
        self._folder = tempfile.mkdtemp(prefix="forage-reward-")
        self._children: list[Child] = []
        self._stop = threading.Event()
        self._watchers: list[threading.Thread] = []
        self._down = 0
        self._lock = threading.Lock()

    def metrics(self) -> bytes:
        """The page of all workers together."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry) + generate_latest(_own)

    def listen(self) -> Workers:
        """Start all and wait until they serve."""
        try:
            self._port = _reserve(self._settings.reward.grpc_address)
            self._children = [self._spawn(index) for index in range(self._settings.reward.workers)]
            for child in self._children:
                self._await(child)
        except (UserError, ChildDiedError, ChildTimeoutError) as error:
            for child in self._children:
                child.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise error if isinstance(error, UserError) else UserError(f"a worker did not start: {error}") from None
        for index in range(len(self._children)):
            watcher = threading.Thread(target=self._watch, args=(index,), name="watch", daemon=True)
            watcher.start()
            self._watchers.append(watcher)
        return self

    def drain(self) -> None:
        """Have all finish their calls at once, and end those that do not."""
        self._stop.set()
        for watcher in self._watchers:
            watcher.join()
        for child in self._children:
            child.hang_up()
        deadline = time.monotonic() + DRAIN_S + 5
        while any(child.alive for child in self._children) and time.monotonic() < deadline:
            time.sleep(_WATCH_S / 2)
        for child in self._children:
            child.kill()
        self._port.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, index: int) -> Child:
        child = Child(
            "forage_reward.serve.worker",
            [self._folder, str(index), str(self._settings.reward.workers)],
            environment={"PROMETHEUS_MULTIPROC_DIR": self._folder},
        )
        try:
            child.send(self._settings.to_yaml().encode(), START_TIMEOUT_S)
        except (ChildDiedError, ChildTimeoutError):
            child.kill()
            raise
        return child

    def _await(self, child: Child) -> None:
        sentence = child.receive(START_TIMEOUT_S).decode()
        if sentence:
            raise UserError(sentence)

    def _watch(self, index: int) -> None:
        delay = 0.0
        while not self._stop.wait(_WATCH_S):
            if self._children[index].alive:
                continue
            self._count_down(+1)
            ended = self._children[index]
            get_logger().error("worker_ended", worker=index, exit_code=ended.process.returncode)
            ended.kill()
            mark_process_dead(ended.process.pid, path=self._folder)  # type: ignore[no-untyped-call]
            while not self._stop.wait(delay):
                RESTARTS.inc()
                try:
                    child = self._spawn(index)
                    self._children[index] = child
                    self._await(child)
                    delay = 0.0
                    self._count_down(-1)
                    break
                except (UserError, ChildDiedError, ChildTimeoutError) as error:
                    self._children[index].kill()
                    delay = min(_MAX_DELAY_S, max(0.2, 2 * delay))
                    get_logger().error("worker_cannot_start", worker=index, error=str(error), retry_s=delay)

    def _count_down(self, change: int) -> None:
        with self._lock:
            self._down += change
            if self._down == len(self._children):
                self._health.wait_for("workers", "every worker has ended; they are being started again")
            else:
                self._health.mark_ready("workers")


def _reserve(address: str) -> socket.socket:
    """Hold a port for processes that share it.

    Raises:
        UserError: somebody else uses it.
    """
    host, port = split_address(address)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise port_in_use_error(address, error) from None
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, port))
    return held
