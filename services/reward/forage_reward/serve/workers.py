"""Several worker processes on one port: the kernel distributes connections, this process supervises the workers.

Each worker is a complete server; long batches are shared with idle peers. Their sockets and metrics are files in one
folder, and this process adds up the metrics.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from forage_reward.serve.server import DRAIN_S
from forage_runtime.addresses import bind_socket
from forage_runtime.errors import UserError
from forage_runtime.files.socket_folder import find_socket_folder
from forage_runtime.settings import Settings
from forage_runtime.telemetry.health import WAITING, Health
from forage_runtime.telemetry.logs import get_logger
from forage_sandbox.child import Child, ChildError

_own = CollectorRegistry()
RESTARTS = Counter("forage_reward_worker_restarts_total", "Restarts of worker processes", registry=_own)
_own.register(WAITING)
_POLL_INTERVAL_S = 0.1
_LONGEST_SOCKET = "forage-reward-12345678/worker-9999.sock"
_MAX_RETRY_S = 10.0


class WorkerPool:
    """The workers of one service. `listen` raises UserError where `Server` or its `listen` would."""

    def __init__(self, settings: Settings, health: Health) -> None:
        self._settings = settings
        self._health = health
        self._folder = tempfile.mkdtemp(prefix="forage-reward-", dir=find_socket_folder(_LONGEST_SOCKET))
        self._children: list[Child] = []
        self._stop = threading.Event()
        self._watchers: list[threading.Thread] = []
        self._ended = 0
        self._lock = threading.Lock()

    def metrics(self) -> bytes:
        """Render the metrics of all workers together."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry) + generate_latest(_own)

    def listen(self) -> WorkerPool:
        """Start all workers and wait until they serve."""
        try:
            self._port = _reserve_port(self._settings.reward.grpc_address)
            self._children = [self._spawn(index) for index in range(self._settings.reward.workers)]
            for child in self._children:
                child.wait_until_ready()
        except (UserError, ChildError) as error:
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
        """Let all workers finish their calls at the same time, then kill those that have not."""
        self._stop.set()
        for watcher in self._watchers:
            watcher.join()
        for child in self._children:
            child.hang_up()
        deadline = time.monotonic() + DRAIN_S + 5
        while any(child.is_alive for child in self._children) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S / 2)  # wait: has a time limit, while the service stops
        for child in self._children:
            child.kill()
        self._port.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, index: int) -> Child:
        return Child(
            "forage_reward.serve.worker",
            [self._folder, str(index), str(self._settings.reward.workers)],
            environment={"PROMETHEUS_MULTIPROC_DIR": self._folder},
            first_frame=self._settings.to_yaml().encode(),
        )

    def _watch(self, index: int) -> None:
        delay_s = 0.0
        while not self._stop.wait(_POLL_INTERVAL_S):  # wait: pause between two looks
            if self._children[index].is_alive:
                continue
            self._change_ended(+1)
            ended = self._children[index]
            get_logger().error("worker_ended", worker=index, exit_code=ended.process.returncode)
            ended.kill()
            mark_process_dead(ended.process.pid, path=self._folder)  # type: ignore[no-untyped-call]
            while not self._stop.wait(delay_s):  # wait: pause before a restart, ten seconds at most
                RESTARTS.inc()
                try:
                    child = self._spawn(index)
                    self._children[index] = child
                    child.wait_until_ready()
                    delay_s = 0.0
                    self._change_ended(-1)
                    break
                except (UserError, ChildError) as error:
                    self._children[index].kill()
                    delay_s = min(_MAX_RETRY_S, max(0.2, 2 * delay_s))
                    get_logger().error("worker_cannot_start", worker=index, error=str(error), retry_s=delay_s)

    def _change_ended(self, change: int) -> None:
        with self._lock:
            self._ended += change
            if self._ended == len(self._children):
                self._health.wait_for("workers", "every worker has ended; they are being started again")
            else:
                self._health.mark_ready("workers")


def _reserve_port(address: str) -> socket.socket:
    """Bind a port for processes that share it, so that it stays theirs while all of them restart.

    Raises:
        UserError: another process uses it.
    """
    bind_socket(address).close()  # with the option below it would be shared with another service, unnoticed
    return bind_socket(address, socket.SO_REUSEPORT)
