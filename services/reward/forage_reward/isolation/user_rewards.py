"""User rewards: functions of the operator, each in processes of its own with a time and a memory limit.

A crash, a hang or a wrong value becomes a status of that one trajectory; the process is started again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from prometheus_client import Counter
from pydantic import ConfigDict

from forage_common.errors import SettingsError
from forage_common.settings import UserReward
from forage_common.telemetry.logs import get_logger
from forage_common.v1 import reward_pb2, trajectory_pb2
from forage_reward.deadline import within
from forage_reward.isolation.child import START_TIMEOUT_S, Child, ChildDiedError, ChildTimeoutError
from forage_reward.isolation.user_process import OUT_OF_MEMORY
from forage_reward.reward import AnyReward, Reward, RewardParams
from forage_reward.score import Score, Status, refused
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import from_proto, item_of, set_params

RESTARTS = Counter("forage_reward_user_restarts_total", "User reward processes started again", ["reward", "reason"])


class UserParams(RewardParams):
    """Whatever the function takes: passed on as they are."""

    model_config = ConfigDict(extra="allow")


class UserPool:
    """The processes of one user reward. Any number of threads may share one.

    Raises:
        SettingsError: the function cannot be loaded.
    """

    def __init__(self, name: str, settings: UserReward) -> None:
        self._name = name
        self._settings = settings
        self._free: queue.LifoQueue[Child] = queue.LifoQueue()
        self._all: list[Child] = []
        self._closed = False
        self._lock = threading.Lock()
        for _ in range(settings.processes):
            try:
                self._free.put(self._start())
            except (ChildDiedError, ChildTimeoutError, SettingsError) as error:
                self.close()
                raise SettingsError(f"reward.user.{name}: {error}") from None

    def judge(self, view: TrajectoryView, truth: GroundTruth, params: UserParams) -> Score:
        """What the function says, TIMEOUT when it hangs, INTERNAL when it dies or breaks its contract."""
        limit = within(self._settings.timeout_s)
        child = self._take(limit)
        if child is None:
            return refused(Status.TIMEOUT, self._name, f"no process of it was free within {limit:g} s")
        call = reward_pb2.UserRewardCall(item=item_of(view, truth))
        set_params(call.params, params.model_dump())
        # With all its time: a caller in more of a hurry has left by then, and need not cost the process its life.
        try:
            answer = child.call(call.SerializeToString(), self._settings.timeout_s)
        except ChildTimeoutError as error:
            self._replace(child, "hang")
            return refused(Status.TIMEOUT, self._name, f"{error}: its process is killed and started again")
        except ChildDiedError as error:
            memory = child.process.returncode == OUT_OF_MEMORY
            self._replace(child, "memory" if memory else "crash")
            detail = f"it needs more memory than memory_mib={self._settings.memory_mib}" if memory else str(error)
            return refused(Status.INTERNAL, self._name, f"{detail}: its process is started again")
        self._free.put(child)
        return from_proto(trajectory_pb2.Score.FromString(answer))

    def _take(self, limit_s: float) -> Child | None:
        try:
            return self._free.get(timeout=limit_s) if limit_s > 0 else None
        except queue.Empty:
            return None

    def close(self) -> None:
        """Kill its processes."""
        with self._lock:
            self._closed = True
            for child in self._all:
                child.kill()

    def _start(self) -> Child:
        s = self._settings
        path = str(s.path or "")
        child = Child(
            "forage_reward.isolation.user_process", [self._name, path, s.entry_point, s.function, str(s.memory_mib)]
        )
        with self._lock:
            self._all.append(child)
            if self._closed:  # closed while a process was being started again
                child.kill()
        try:
            sentence = child.receive(START_TIMEOUT_S).decode()
            if sentence:
                raise SettingsError(sentence)
        except (ChildDiedError, ChildTimeoutError, SettingsError):
            self._forget(child)
            raise
        return child

    def _forget(self, child: Child) -> None:
        with self._lock:
            child.kill()
            if child in self._all:
                self._all.remove(child)

    def _replace(self, child: Child, reason: str) -> None:
        RESTARTS.labels(self._name, reason).inc()
        get_logger().warning("user_reward_restarted", reward=self._name, reason=reason)
        # Beside the call that failed, which need not wait for an interpreter to start.
        threading.Thread(target=self._restart, args=(child,), name="restart", daemon=True).start()

    def _restart(self, child: Child) -> None:
        self._forget(child)
        wait = threading.Event()
        delay = 0.1
        while not self._closed:
            try:
                return self._free.put(self._start())
            except (ChildDiedError, ChildTimeoutError, SettingsError) as error:
                get_logger().error("user_reward_cannot_start", reward=self._name, error=str(error), retry_s=delay)
            wait.wait(delay)
            delay = min(30.0, 2 * delay)


class UserRewards:
    """All user rewards of a configuration; their processes live until `close`.

    Raises:
        SettingsError: a name is taken, or a function cannot be loaded.
    """

    def __init__(self, settings: Mapping[str, UserReward], taken: Mapping[str, AnyReward]) -> None:
        self._pools: list[UserPool] = []
        self.rewards: dict[str, AnyReward] = {}
        for name, user in settings.items():
            if name in taken:
                self.close()
                raise SettingsError(f"reward.user.{name} has the name of a built-in reward: give it another")
            try:
                pool = UserPool(name, user)
            except SettingsError:
                self.close()
                raise
            self._pools.append(pool)
            summary = f"user code: {user.path or user.entry_point}"
            self.rewards[name] = Reward(name, summary, UserParams, pool.judge, blocking=True)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
