"""The running deployments, as the servers in front of them call them, and what is known of their state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from forage_common.errors import ForageError, UnavailableError
from forage_common.telemetry.health import Health
from forage_common.v1.rollout_pb2 import RunStreamResponse
from forage_common.v1.trajectory_pb2 import Policy, Prompt, TrajectoryGroup
from forage_rollout.deployments.cluster import Cluster
from forage_rollout.engine.openai import Head
from forage_rollout.metrics import Shown, Snapshot
from forage_rollout.weights.policy import PolicyError, is_newer

DEPLOYMENTS = ("Engine", "Agent", "Dispatcher")


class RefusedPolicyError(ForageError):
    """A policy is not newer than what is served, or cannot be loaded; nothing has changed."""


class Backend(Protocol):
    """What the servers need of the service. Every method raises UnavailableError where a replica has died."""

    async def run(self, prompt: Prompt) -> TrajectoryGroup:
        """Every sample of the prompt."""
        ...

    def stream(self, prompt: Prompt) -> AsyncGenerator[RunStreamResponse, None]:
        """What happens, as it happens; the whole group comes last. Closing it early ends the samples."""
        ...

    async def pause(self, drain: bool) -> int:
        """Hold every engine; returns how many once all stand still."""
        ...

    async def resume(self) -> int:
        """Let every engine go on; returns how many."""
        ...

    async def update(self, policy: Policy) -> float:
        """Load a policy everywhere; the seconds of the longest standstill.

        Raises:
            RefusedPolicyError: an engine would not load it.
        """
        ...

    def openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[Head | bytes, None]:
        """A reply of the engine's OpenAI-compatible endpoints: (status, headers), then its body in parts."""
        ...

    async def snapshots(self) -> dict[str, list[Snapshot]]:
        """What every replica of each deployment says of itself."""
        ...


@dataclass
class State:
    """What the servers tell about the service.

    Attributes:
        running: prompts can be run: the deployments have started, and the end has not begun.
        serving: the oldest policy that an engine serves; None before any was published.
        announced: what engines are to serve.
        queues: gauge → entries of a stream.
    """

    health: Health
    shown: Shown = field(default_factory=Shown)
    running: bool = False
    serving: Policy | None = None
    announced: Policy | None = None
    queues: dict[str, int] = field(default_factory=dict)

    async def look(self, backend: Backend) -> None:
        """Ask every replica how it is.

        Raises:
            UnavailableError: one does not answer; what is shown stays as it was.
        """
        snapshots = await backend.snapshots()
        self.serving = oldest([snapshot.serving for snapshot in snapshots["Engine"]])
        self.shown.update(snapshots, self.serving, self.announced, self.queues)

    def demand(self) -> None:
        """Return if prompts can be run.

        Raises:
            UnavailableError: says what is being waited for.
        """
        if not self.running:
            waiting = "; ".join(f"{name}: {detail}" for name, detail in self.health.waiting.items())
            raise UnavailableError(f"the rollout service does not take prompts now ({waiting or 'starting'})")


def oldest(policies: Sequence[Policy | None]) -> Policy | None:
    """The policy that every engine has reached; None where one has none, or there are no engines."""
    found = [policy for policy in policies if policy is not None]
    if not found or len(found) < len(policies):
        return None
    return min(found, key=lambda policy: (policy.epoch, policy.version))


class ServeBackend:
    """`Backend` through the Ray Serve application of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def run(self, prompt: Prompt) -> TrajectoryGroup:
        answer = self._cluster.handle("Agent").run.remote(prompt.SerializeToString())
        try:
            return TrajectoryGroup.FromString(await answer)
        except asyncio.CancelledError:
            answer.cancel()  # the caller has gone: nobody would read it
            raise
        except Exception as error:
            raise _failure(error) from error

    async def stream(self, prompt: Prompt) -> AsyncGenerator[RunStreamResponse, None]:
        agent = self._cluster.handle("Agent").options(stream=True)
        async with aclosing(_parts(agent.run_stream.remote(prompt.SerializeToString()))) as parts:
            async for part in parts:
                yield RunStreamResponse.FromString(part)

    async def pause(self, drain: bool) -> int:
        return len(await self._everywhere("Engine", "pause", drain))

    async def resume(self) -> int:
        return len(await self._everywhere("Engine", "resume"))

    async def update(self, policy: Policy) -> float:
        served = [snapshot.serving for snapshot in await self._snapshots("Engine")]
        for serving in served:
            if not is_newer(policy, serving):
                raise RefusedPolicyError(f"{_name(policy)} is not newer than what is served, {_name(serving)}")
        return max(await self._everywhere("Engine", "update", policy.SerializeToString()), default=0.0)

    async def openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[Head | bytes, None]:
        engine = self._cluster.handle("Engine").options(stream=True)
        async with aclosing(_parts(engine.openai.remote(method, path, list(headers), body))) as parts:
            async for part in parts:
                yield part

    async def snapshots(self) -> dict[str, list[Snapshot]]:
        found = await asyncio.gather(*map(self._snapshots, DEPLOYMENTS))
        return dict(zip(DEPLOYMENTS, found, strict=True))

    async def _snapshots(self, deployment: str) -> list[Snapshot]:
        return [
            Snapshot(replica, counts, Policy.FromString(served) if served else None)
            for replica, served, counts in await self._everywhere(deployment, "snapshot")
        ]

    async def _everywhere(self, deployment: str, method: str, *arguments: Any) -> list[Any]:
        try:
            found: list[Any] = await self._cluster.broadcast(deployment, method, *arguments)
        except Exception as error:
            raise _failure(error) from error
        return found


async def _parts(replies: Any) -> AsyncGenerator[Any, None]:
    """A streaming call's parts; ends the call when it is closed early."""
    ended = False
    try:
        async for part in replies:
            yield part
        ended = True
    except Exception as error:
        ended = True
        raise _failure(error) from error
    finally:
        if not ended:
            replies.cancel()


def _failure(error: Exception) -> ForageError:
    """What a call's error means to whoever asked for it."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, PolicyError):
        return RefusedPolicyError(str(cause))
    return UnavailableError(f"a part of the service failed ({type(cause).__name__}: {cause}): try again")


def _name(policy: Policy | None) -> str:
    return "none" if policy is None else f"version {policy.version} of epoch {policy.epoch}"
