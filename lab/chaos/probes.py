"""Whether a part of the stack works again after a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import grpc
import psutil

from chaos.stack import ROLLOUT_GRPC, Stack
from forage_proto.v1.rollout_pb2 import RunRequest
from forage_proto.v1.rollout_pb2_grpc import RolloutStub
from forage_proto.v1.trajectory_pb2 import ChatMessage, Prompt, Purpose, Sampling, Status

_ASK_S = 10.0
_ENGINE_ROLES = ("rollout", "raylet", "gcs", "agent", "replica", "engine-core")
"""Roles without which no question is answered."""


class Asker:
    """Asks the rollout service questions, one at a time, beside the training."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._thread: threading.Thread | None = None
        self._answered = 0.0
        """When the last question was asked that was answered."""

    def was_answered_since(self, moment: float) -> bool:
        """Whether a question that was asked after `moment` has been answered; asks one if not."""
        if self._answered > moment:
            return True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()
        return False

    def _ask(self) -> None:
        began = time.time()
        prompt = Prompt(
            group_uid=f"ask/{time.time_ns()}",
            messages=[ChatMessage(role="user", content="Who?")],
            samples=1,
            environment="single_turn",
            purpose=Purpose.PURPOSE_ASK,
            sampling=Sampling(temperature=1.0),
        )
        try:
            with grpc.insecure_channel(f"127.0.0.1:{self._stack.base_port + ROLLOUT_GRPC}") as channel:
                group = RolloutStub(channel).Run(RunRequest(prompt=prompt), timeout=_ASK_S).group
        except grpc.RpcError:
            return
        if all(trajectory.status == Status.STATUS_OK for trajectory in group.trajectories):
            self._answered = began


class Probe:
    """Whether a role of the stack works again: made before a fault, called after it.

    Attributes:
        since: signs of life count from this moment: the kill, or the end of a fault that lasts.
    """

    def __init__(self, stack: Stack, asker: Asker, role: str, gone: set[int] | None = None) -> None:
        """
        Args:
            gone: processes that are killed, so that others must take their place.
        """
        self._stack, self._asker, self._role, self._gone = stack, asker, role, gone or set()
        self._count = len(stack.find(role))
        self.since = time.time()

    def __call__(self) -> bool:
        return self._is_running() and self._serves()

    def _is_running(self) -> bool:
        running = [p for p in self._stack.find(self._role) if p.pid not in self._gone and not is_stopped(p)]
        return len(running) >= self._count

    def _serves(self) -> bool:
        stack, role = self._stack, self._role
        if role == "redis":
            return stack.answers_redis()
        if role == "store":
            return stack.store is not None and stack.store.create_bucket()
        if role == "dispatcher":
            return any(last > self.since for last in stack.read_consumers().values())
        if role == "supervisor":
            return all(map(stack.is_ready, ("reward", "retriever", "rollout", "trainer")))
        if role in _ENGINE_ROLES:
            return stack.is_ready("rollout") and self._asker.was_answered_since(self.since)
        return stack.is_ready({"rank": "trainer", "reward-worker": "reward"}.get(role, role))


def is_stopped(process: psutil.Process) -> bool:
    """Whether a process was stopped by a signal."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def all_of(probes: Sequence[Callable[[], bool]]) -> Callable[[], bool]:
    """A probe that is true once each of several has been true."""
    left = list(probes)

    def probe() -> bool:
        left[:] = [each for each in left if not each()]
        return not left

    return probe
