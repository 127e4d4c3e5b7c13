"""The calls of the servers (gRPC, HTTP) to the deployments, and the state of the service that they show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from forage_proto.v1.rollout_pb2 import RunStreamResponse
from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Sampling, TrajectoryGroup
from forage_rollout.chats.memory import name_chat
from forage_rollout.deployments.cluster import Cluster
from forage_rollout.engine.openai import CHATS, ResponseHead
from forage_rollout.engine.sampling_parameters import RefusedSamplingError
from forage_rollout.metrics import RolloutCollector, Snapshot
from forage_rollout.sessions.requests import HttpReply
from forage_rollout.sessions.table import find_replica
from forage_runtime.errors import ForageError, UnavailableError
from forage_runtime.telemetry.health import Health
from forage_weights.announcement import PolicyError
from forage_weights.rollout.policy import find_oldest, is_newer

DEPLOYMENTS = ("Engine", "Agent", "Dispatcher")
_LOOK_S = 0.2


class RefusedPolicyError(ForageError):
    """A policy is not newer than the served one, or cannot be loaded; nothing has changed."""


class ServeBackend:
    """The Ray Serve application of a cluster. Every method raises UnavailableError where a replica has died."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._looking = asyncio.Lock()  # one worker looks for all: each gets its session in the order of arrival

    async def check_sampling(self, sampling: Sampling) -> None:
        """Return if the engine can sample so.

        Raises:
            RefusedSamplingError: it cannot; the message has its words.
        """
        answer = self._cluster.get_handle("Engine").check_sampling.remote(sampling.SerializeToString())
        try:
            parameter, words = await answer
        except Exception as error:
            raise _translate(error) from error
        if words:
            raise RefusedSamplingError(words, parameter)

    async def run_group(self, prompt: Prompt) -> TrajectoryGroup:
        """Run every sample of the prompt."""
        return TrajectoryGroup.FromString(await self._call_agent("run_group", prompt.SerializeToString()))

    async def stream_group(self, prompt: Prompt) -> AsyncGenerator[RunStreamResponse, None]:
        """Run every sample; yields each event at once and the whole group last. Closing it early ends the samples."""
        agent = self._cluster.get_handle("Agent").options(stream=True)
        async with aclosing(_iterate_reply(agent.stream_group.remote(prompt.SerializeToString()))) as parts:
            async for part in parts:
                yield RunStreamResponse.FromString(part)

    async def pause(self, drain: bool) -> int:
        """Pause every engine; returns their number once all are paused."""
        return len(await self._broadcast("Engine", "pause", drain))

    async def resume(self) -> int:
        """Resume every engine; returns their number."""
        return len(await self._broadcast("Engine", "resume"))

    async def load_policy(self, policy: Policy) -> float:
        """Load a policy into every engine; returns the seconds of the longest pause.

        Raises:
            RefusedPolicyError: an engine refused the policy.
        """
        # Checked for all engines first, so that a policy which one of them refuses is loaded by none.
        for snapshot in await self._broadcast("Engine", "take_snapshot"):
            if not is_newer(policy, snapshot.serving):
                raise RefusedPolicyError(
                    f"{_describe(policy)} is not newer than what is served, {_describe(snapshot.serving)}"
                )
        return max(await self._broadcast("Engine", "load_policy", policy.SerializeToString()), default=0.0)

    async def forward_openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Answer a request to the engine's OpenAI-compatible endpoints: (status, headers), then the body in parts."""
        engine = self._cluster.get_handle("Engine").options(stream=True)
        # The turns of a chat go to the replica that remembers its tokens.
        chat = name_chat(body) if path == CHATS else ""
        reply = engine.forward_openai.remote(method, path, list(headers), body, chat=chat)
        async with aclosing(_iterate_reply(reply)) as parts:
            async for part in parts:
                yield part

    async def take_session(self, wait_s: float) -> dict[str, Any] | None:
        """A session for a worker, see `SessionTable.take`; None where none waits within the time."""
        deadline = asyncio.get_running_loop().time() + wait_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._looking.acquire()
        except TimeoutError:
            return None
        try:
            while True:
                waiting: dict[str, int] = dict(await self._broadcast("Agent", "count_waiting_sessions"))
                replica = max(waiting, key=lambda name: waiting[name], default="")
                if waiting.get(replica) and (taken := await self._call_agent("take_session", replica=replica)):
                    return dict(taken)
                if asyncio.get_running_loop().time() >= deadline:
                    return None
                await asyncio.sleep(_LOOK_S)  # wait: pause between two looks
        finally:
            self._looking.release()

    async def answer_session(self, id: str, key: str, verb: str, body: bytes) -> HttpReply:
        """Answer a worker's request; see `SessionTable.answer`."""
        reply: HttpReply = await self._call_agent("answer_session", id, key, verb, body, replica=find_replica(id))
        return reply

    async def take_snapshots(self) -> dict[str, list[Snapshot]]:
        """Snapshots of every replica, by deployment."""
        taken = await asyncio.gather(*(self._broadcast(deployment, "take_snapshot") for deployment in DEPLOYMENTS))
        return dict(zip(DEPLOYMENTS, taken, strict=True))

    async def _call_agent(self, method: str, *arguments: Any, **named: Any) -> Any:
        answer = getattr(self._cluster.get_handle("Agent"), method).remote(*arguments, **named)
        try:
            return await answer
        except asyncio.CancelledError:
            answer.cancel()  # the caller has gone
            raise
        except Exception as error:
            raise _translate(error) from error

    async def _broadcast(self, deployment: str, method: str, *arguments: Any) -> list[Any]:
        try:
            results: list[Any] = await self._cluster.broadcast(deployment, method, *arguments)
        except Exception as error:
            raise _translate(error) from error
        return results


@dataclass
class ServiceState:
    """The state of the service, as its servers show it.

    Attributes:
        running: prompts can be run: the deployments have started, and draining has not begun.
        serving: the oldest policy that an engine serves; None before any was published.
        announced: the policy that engines are to serve.
        queues: gauge → entries of a stream.
        waits: those of all replicas, as of the last snapshots.
    """

    health: Health
    collector: RolloutCollector = field(default_factory=RolloutCollector)
    running: bool = False
    serving: Policy | None = None
    announced: Policy | None = None
    queues: dict[str, int] = field(default_factory=dict)
    waits: list[dict[str, Any]] = field(default_factory=list)

    async def refresh(self, backend: ServeBackend) -> None:
        """Take snapshots of every replica.

        Raises:
            UnavailableError: a replica does not answer; the state stays as it was.
        """
        snapshots = await backend.take_snapshots()
        self.serving = find_oldest([snapshot.serving for snapshot in snapshots["Engine"]], self.announced)
        self.health.set_notes({what: detail for one in snapshots["Dispatcher"] for what, detail in one.notes.items()})
        self.waits = [wait for taken in snapshots.values() for one in taken for wait in one.waits]
        self.collector.update(snapshots, self.serving, self.announced, self.queues)

    def require_running(self) -> None:
        """Return if prompts can be run.

        Raises:
            UnavailableError: they cannot; names what the service waits for.
        """
        if not self.running:
            waiting = "; ".join(f"{name}: {detail}" for name, detail in self.health.waiting.items())
            raise UnavailableError(f"the rollout service does not take prompts now ({waiting or 'starting'})")


async def _iterate_reply(replies: Any) -> AsyncGenerator[Any, None]:
    """The parts of a streaming call; closing the iterator early cancels the call."""
    ended = False
    try:
        async for part in replies:
            yield part
        ended = True
    except Exception as error:
        ended = True
        raise _translate(error) from error
    finally:
        if not ended:
            replies.cancel()


def _translate(error: Exception) -> ForageError:
    """The error that a caller sees for an exception of a Serve call."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, PolicyError):
        return RefusedPolicyError(str(cause))
    return UnavailableError(f"a part of the service failed ({type(cause).__name__}: {cause}): try again")


def _describe(policy: Policy | None) -> str:
    return "none" if policy is None else f"version {policy.version} of epoch {policy.epoch}"
