"""Parts shared by the replicas of every deployment: name, logs, and calls of each other through Serve."""

from __future__ import annotations

import contextvars
import socket
import uuid
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from forage_common.telemetry.logs import configure_logs
from forage_common.telemetry.stacks import write_stacks_on_signal
from forage_rollout.deployments.relay import redirect_stderr

# Bounded so that a call waits for an unavailable Redis no longer than a health check may take.
REDIS_TIMEOUT_S = 4.0


def start_logs() -> None:
    """Send this replica's log, and on a signal its stacks, to the main process or the folder of stacks."""
    redirect_stderr()
    configure_logs("rollout")
    write_stacks_on_signal()


def build_process_name() -> str:
    """A name of this process that no other has, not even the same replica after a restart."""
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"


def call_replica(handle: DeploymentHandle, *arguments: Any) -> DeploymentResponse:
    """Call one replica under a request id of its own.

    In the context of a request all calls carry its id. Serve's router tells waiting calls apart by id and would lose
    all but one of those that wait at the same time; an empty context gives each call a new id.
    """
    return contextvars.Context().run(handle.remote, *arguments)


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
