"""Parts shared by the replicas of every deployment: name, logs, and calls of each other through Serve."""

from __future__ import annotations

import asyncio
import contextvars
import ipaddress
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.serve._private import replica as serve_replica
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from forage_rollout.deployments.relay import redirect_stderr
from forage_rollout.metrics import CountKey
from forage_runtime.addresses import join_address, split_address
from forage_runtime.telemetry.logs import configure_logs
from forage_runtime.telemetry.stacks import write_stacks_on_signal

_CHECK_S = 2.0
_POLL_INTERVAL_S = 0.1
# Bounded so that a call waits for an unavailable Redis no longer than a health check may take.
REDIS_TIMEOUT_S = 4.0


def start_process() -> None:
    """Send this replica's log, and on a signal its stacks, to the main process or the folder of stacks.

    In a Ray on loopback its port is on loopback, too.
    """
    redirect_stderr()
    configure_logs("rollout")
    write_stacks_on_signal()
    _stay_on_loopback()


def _stay_on_loopback() -> None:
    """Let Serve open the port of this replica on its node's address: it would on all, and no setting changes this."""
    host = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(host).is_loopback:
        return  # other nodes call it; who may is a matter of Ray's token, its TLS and the network policy
    open_port = serve_replica.add_port_to_grpc_server

    def open_on_node(server: Any, address: str) -> Any:
        return open_port(server, join_address(host, split_address(address)[1]))

    serve_replica.add_port_to_grpc_server = open_on_node


def build_process_name() -> str:
    """A name of this process that no other has, not even the same replica after a restart."""
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"


def call_replica(handle: DeploymentHandle, *arguments: Any) -> DeploymentResponse:
    """Call one replica under a request id of its own.

    In the context of a request all calls carry its id. Serve's router tells waiting calls apart by id and would lose
    all but one of those that wait at the same time; an empty context gives each call a new id.
    """
    return contextvars.Context().run(handle.remote, *arguments)


class CheckPace:
    """Makes each health check of a replica last until it fails or the next one is due.

    Serve calls a check again soon after it has ended. So a call is always under way, and its failure tells Serve at
    once that the process has died, or that the check has failed. Each look meanwhile also shows how late this process
    runs what is due.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._looks = 0
        self._late_s = 0.0

    async def last(self, has_failed: Callable[[], bool] = lambda: False) -> None:
        """Last for two seconds, or until `has_failed`; not at all the first time, for which Serve waits."""
        if not self._has_begun:
            self._has_begun = True
            return
        now = time.monotonic()
        deadline = now + _CHECK_S
        while not has_failed() and now < deadline:
            await asyncio.sleep(_POLL_INTERVAL_S)  # wait: pause between two looks
            due, now = now + _POLL_INTERVAL_S, time.monotonic()
            self._looks += 1
            self._late_s += now - due

    def read_counts(self, deployment: str) -> dict[CountKey, float]:
        """How late looks came, and how many there were, since the process started."""
        return {("loop_late_seconds", deployment): self._late_s, ("loop_looks", deployment): self._looks}


async def broadcast(handle: DeploymentHandle, method: str, *arguments: Any) -> list[Any]:
    """Call a method on every running replica; a replica that ends meanwhile is left out of the results.

    Raises:
        Exception: the method itself raised, on whichever replica.
    """
    try:
        results = await handle.broadcast(method, *arguments).results_async(return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, RayActorError):
            raise result
    return [result for result in results if not isinstance(result, RayActorError)]
