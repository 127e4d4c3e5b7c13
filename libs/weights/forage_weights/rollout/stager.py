"""Policies made ready in the workers of an engine while it generates."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.telemetry.waits import waiting
from forage_weights.announcement import PolicyError, describe_policy
from forage_weights.cache import HeldDelta

T = TypeVar("T")
_LOOK_S = 0.2
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05


@dataclass(frozen=True)
class StagedPolicy:
    """A policy that every worker has ready.

    Attributes:
        number: its name in the workers.
        pause_s: seconds for which the worker that took longest stood still to begin with it.
    """

    number: int
    pause_s: float


class Stager:
    """Has every worker of one AsyncLLM make a policy ready.

    Args:
        llm: vLLM's AsyncLLM.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._numbers = itertools.count(1)
        self._dropping: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def stage(
        self, policy: Policy, files: Sequence[Path], deltas: Sequence[HeldDelta] = (), content: str = ""
    ) -> AsyncIterator[StagedPolicy]:
        """Make a policy ready; in the block it can be put in place by its number, and is dropped at its end if not.

        Args:
            files: safetensors files on this machine that hold the whole policy.
            deltas: those that lead to the policy, oldest first.
            content: digest of the whole policy; empty if unknown.

        Raises:
            PolicyError: it cannot be loaded; the workers go on as before.
        """
        number = next(self._numbers)
        stamps = read_stamps(policy, files)
        try:
            changes = [(delta.base, [str(file) for file in delta.files]) for delta in deltas]
            arguments = number, [str(file) for file in files], changes, content
            pause_s = await call_living(self._llm, self._make_ready(policy, arguments))
            if read_stamps(policy, files) != stamps:
                raise PolicyError(f"{describe_policy(policy)}: its files have changed while they were read")
            yield StagedPolicy(number, pause_s)
        finally:
            # Not waited for: the call takes until the step has ended in which the new policy computes all keys again.
            dropping = asyncio.create_task(self._drop(number))
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    async def _drop(self, number: int) -> None:
        # An engine that has died has nothing to drop, and whoever waits for it hears of that elsewhere.
        with contextlib.suppress(Exception):
            await self._llm.collective_rpc("drop_policy", args=(number,))

    async def _make_ready(self, policy: Policy, arguments: tuple[Any, ...]) -> float:
        pause_s: float = max(await self._llm.collective_rpc("begin_policy", args=arguments))
        interval_s = _FIRST_POLL_S
        with waiting(
            "a policy to be loaded beside the served one",
            on="the engine's workers",
            limit_s=None,
            why_unlimited="the old policy is served meanwhile, and a newer announcement ends it",
            detail=describe_policy(policy),
        ):
            while True:
                states = await self._llm.collective_rpc("poll_policy", args=arguments[:1])
                if errors := [error for _, error in states if error]:
                    raise PolicyError(f"{describe_policy(policy)} cannot be loaded ({errors[0]})")
                if all(is_ready for is_ready, _ in states):
                    return pause_s
                await asyncio.sleep(interval_s)
                interval_s = min(2 * interval_s, _LAST_POLL_S)


async def call_living(llm: Any, call: Coroutine[Any, Any, T]) -> T:
    """Wait for calls of an engine's process, which vLLM leaves without an answer when the process dies.

    Raises:
        EngineDeadError: it has died.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    calling = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([calling], timeout=_LOOK_S))[0]:  # wait: named by the caller
            if llm.errored:
                raise EngineDeadError
        return calling.result()
    finally:
        calling.cancel()


def read_stamps(policy: Policy, files: Sequence[Path]) -> list[tuple[int, ...]]:
    """What tells whether files have changed.

    Raises:
        PolicyError: a file cannot be read.
    """
    try:
        found = [file.stat() for file in files]
    except OSError as error:
        raise PolicyError(f"{describe_policy(policy)}: {error.filename} cannot be read ({error.strerror})") from None
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found]
