"""User rewards: functions of the operator, each in its own confined processes with a time and a memory limit.

A crash, a hang or an invalid value becomes a status of that one trajectory, and the process is restarted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping

from google.protobuf.message import DecodeError
from prometheus_client import Counter
from pydantic import ConfigDict

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward.deadline import limit_to_deadline
from forage_reward.isolation.user_code import ContractError, check_score
from forage_reward.isolation.user_process import OUT_OF_MEMORY
from forage_reward.reward import AnyReward, Reward, RewardParams
from forage_reward.score import Score, Status, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import build_item, from_proto, write_params
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import UserReward
from forage_runtime.settings.security import Sandbox
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting
from forage_sandbox.child import Child, ChildDiedError, ChildError, ChildTimeoutError
from forage_sandbox.support import build_confinement, describe, log_protections

RESTARTS = Counter("forage_reward_user_restarts_total", "Restarts of user reward processes", ["reward", "reason"])
_MAX_RETRY_S = 30.0


class UserParams(RewardParams):
    """Parameters of the function, which are passed on unchecked."""

    model_config = ConfigDict(extra="allow")


class UserPool:
    """The processes of one user reward. Thread-safe.

    Raises:
        SettingsError: the function cannot be loaded, or security.user_code asks for more than this machine has.
    """

    def __init__(self, name: str, settings: UserReward, mode: Sandbox = "auto") -> None:
        self._name = name
        self._settings = settings
        self._confinement = build_confinement(f"reward.user.{name}", settings, settings.memory_mib, mode)
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()
        self._children: list[Child] = []
        self._closed = False
        self._lock = threading.Lock()
        for _ in range(settings.processes):
            try:
                self._idle.put(self._start())
            except (ChildError, UserError) as error:
                self.close()
                raise SettingsError(f"reward.user.{name}: {error}") from None

    def compute_score(self, view: TrajectoryView, truth: GroundTruth, params: UserParams) -> Score:
        """Call the function: TIMEOUT when it hangs, INTERNAL when it crashes or returns an invalid value."""
        limit_s = limit_to_deadline(self._settings.timeout_s)
        child = self._take_idle(limit_s)
        if child is None:
            return withhold_score(Status.TIMEOUT, self._name, f"no process of it was free within {limit_s:g} s")
        call = reward_pb2.UserRewardCall(item=build_item(view, truth))
        write_params(call.params, params.model_dump())
        # The function gets its full time limit: a caller with an earlier deadline has its reply by then, and a shorter
        # limit would only kill the process more often.
        try:
            answer = child.call(call.SerializeToString(), self._settings.timeout_s)
        except ChildTimeoutError as error:
            self._replace(child, "hang")
            return withhold_score(Status.TIMEOUT, self._name, f"{error}: its process is killed and started again")
        except ChildDiedError as error:
            out_of_memory = child.process.returncode == OUT_OF_MEMORY
            self._replace(child, "memory" if out_of_memory else "crash", str(error))
            needs_more = f"it needs more memory than memory_mib={self._settings.memory_mib}"
            detail = needs_more if out_of_memory else str(error)
            return withhold_score(Status.INTERNAL, self._name, f"{detail}: its process is started again")
        try:
            score = from_proto(trajectory_pb2.Score.FromString(answer))
            check_score(self._name, score)
        except (DecodeError, ContractError):  # it wrote to the connection itself
            self._replace(child, "crash")
            return withhold_score(Status.INTERNAL, self._name, "it answered with what is no score: it is started again")
        self._idle.put(child)
        return score

    def _take_idle(self, limit_s: float) -> Child | None:
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                child = self._idle.get(timeout=left_s)
            except queue.Empty:
                break
            if child.is_alive:
                return child
            self._replace(child, "idle", child.describe_end())  # between two calls: no trajectory suffers from that
        return None

    def close(self) -> None:
        """Kill its processes."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()

    def _start(self) -> Child:
        child = Child(
            "forage_reward.isolation.user_process",
            [self._name, self._settings.function],
            confinement=self._confinement,
        )
        with self._lock:
            self._children.append(child)
            if self._closed:  # `close` came while a process was being restarted
                child.kill()
        try:
            child.wait_until_ready()
        except (ChildError, UserError):
            self._remove(child)
            raise
        return child

    def _remove(self, child: Child) -> None:
        with self._lock:
            child.kill()
            if child in self._children:
                self._children.remove(child)

    def _replace(self, child: Child, reason: str, detail: str = "") -> None:
        RESTARTS.labels(self._name, reason).inc()
        get_logger().warning("user_reward_restarted", reward=self._name, reason=reason, detail=detail)
        # On its own thread: the call that failed need not wait for an interpreter to start.
        threading.Thread(target=self._restart, args=(child,), name="restart", daemon=True).start()

    def _restart(self, child: Child) -> None:
        self._remove(child)
        wait = threading.Event()
        delay_s = 0.1
        while not self._closed:
            try:
                return self._idle.put(self._start())
            except (ChildError, UserError) as error:
                get_logger().error("user_reward_cannot_start", reward=self._name, error=str(error), retry_s=delay_s)
            with waiting("the next start of a process", on=f"user reward {self._name}", limit_s=delay_s):
                wait.wait(delay_s)
            delay_s = min(_MAX_RETRY_S, 2 * delay_s)


class UserRewards:
    """All user rewards of a configuration; their processes live until `close`.

    Args:
        mode: security.user_code.

    Raises:
        SettingsError: a name is that of a built-in reward, a function cannot be loaded, or `mode` asks for more than
            this machine has.
    """

    def __init__(
        self, settings: Mapping[str, UserReward], built_in: Mapping[str, AnyReward], mode: Sandbox = "auto"
    ) -> None:
        if settings:
            log_protections("reward", settings, mode)
        self._pools: list[UserPool] = []
        self.rewards: dict[str, AnyReward] = {}
        try:
            for name, user in settings.items():
                if name in built_in:
                    raise SettingsError(f"reward.user.{name} has the name of a built-in reward: give it another")
                pool = UserPool(name, user, mode)
                self._pools.append(pool)
                summary = f"user code: {user.function}; protections: {describe(mode)}"
                self.rewards[name] = Reward(name, summary, UserParams, pool.compute_score, blocking=True)
        except SettingsError:
            self.close()
            raise

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
