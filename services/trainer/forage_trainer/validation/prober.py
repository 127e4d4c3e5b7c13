"""Probes of the policy that is being trained. They wait for unavailable services, and never end a training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from enum import StrEnum
from typing import Any

from prometheus_client import Counter

from forage_probe.metrics import is_finished
from forage_probe.prober import ProbePlan, Prober
from forage_probe.work import IN_FLIGHT, Item, list_probe_items
from forage_proto.v1.probe_pb2 import Probed
from forage_proto.v1.trajectory_pb2 import Policy, Status, Trajectory
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.concurrency import map_concurrently
from forage_runtime.clients.rollout import RolloutClient
from forage_runtime.errors import SettingsError
from forage_runtime.files.served_lora import get_served_lora_rank
from forage_runtime.security.token_file import authorization_metadata
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting

ATTEMPTS = 3
"""Attempts at each probe; every request is also repeated within the deadlines of its service."""
_PAUSE_S = 1.0
POLL_INTERVAL_S = 0.2

PROBES = Counter("forage_trainer_probes_total", "Probes in training", ["purpose", "outcome"])


class Purpose(StrEnum):
    """The purpose of a probe in training."""

    VALIDATION = "validation"
    PENALTY = "penalty"


class TrainingProber:
    """Probes trajectories under the last published policy.

    Failed probes are repeated until `trainer.probe.timeout_s`; after that they are logged and counted, and training
    continues.
    """

    def __init__(self, settings: Settings, purpose: Purpose) -> None:
        """
        Raises:
            SettingsError: the file of the rollout service's token cannot be read; or adapters are published.
        """
        rank = get_served_lora_rank(settings)
        if rank:
            raise SettingsError(
                f"rollout.engine.max_lora_rank is {rank}: completions, which probes ask for, are sampled "
                "without the adapter; set it to 0, so that whole policies are published, or leave out trainer.probe "
                "and trainer.algorithm.probe_penalty"
            )
        authorization_metadata(settings.rollout.auth_token_file)
        self._settings = settings
        probe = settings.trainer.probe
        self.plan = ProbePlan(probe.points, probe.samples, settings.run.seed)
        self._purpose = purpose
        self._timeout_s = probe.timeout_s

    def __call__(
        self,
        policy: Policy,
        ids: Iterable[str],
        sample: Callable[[], Awaitable[Sequence[Trajectory]]],
        check: Callable[[], None],
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> list[Probed]:
        """Return a probe of each turn; the status of a failed one says why.

        Args:
            ids: ids of the trajectories.
            sample: returns the trajectories; called again where it raised.
            check: called periodically; may raise to end the work.
            on_progress: called with the number of finished probes.
        """
        reason = f"there was no time for it within {self._timeout_s:g} s"
        results = {(id, 0): _failed_probe((id, 0), Status.STATUS_TIMEOUT, reason) for id in ids}
        work = self._probe_with_retries(policy, sample, results, on_progress)
        with suppress(TimeoutError), waiting(f"probes for {self._purpose}", on="rollout", limit_s=self._timeout_s):
            asyncio.run(_watch(work, self._timeout_s, check))
        probes = list(results.values())
        failures = [probe for probe in probes if probe.status != Status.STATUS_OK]
        PROBES.labels(self._purpose, "done").inc(len(probes) - len(failures))
        PROBES.labels(self._purpose, "failed").inc(len(failures))
        if failures:
            counts = {"failed": len(failures), "of": len(probes), "reason": failures[0].status_detail}
            get_logger().warning("probes_given_up", purpose=self._purpose, version=policy.version, **counts)
        return probes

    async def _probe_with_retries(
        self,
        policy: Policy,
        sample: Callable[[], Awaitable[Sequence[Trajectory]]],
        results: dict[Item, Probed],
        on_progress: Callable[[int], object],
    ) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._wait_until_served(policy)
                await self._probe(await sample(), results, on_progress)
            except Exception as error:  # noqa: BLE001 - an unavailable service must not end the training
                for probe in results.values():
                    if not is_finished(probe):
                        probe.status_detail = str(error)
            left = [probe for probe in results.values() if not is_finished(probe)]
            if not left:
                return
            reason = left[0].status_detail
            get_logger().info("probes_failed", purpose=self._purpose, attempt=attempt, left=len(left), reason=reason)
            await asyncio.sleep(_PAUSE_S if attempt < ATTEMPTS else 0)  # wait: named by the caller

    async def _wait_until_served(self, policy: Policy) -> None:
        """Wait until every engine serves the policy or a later one of its epoch."""
        async with RolloutClient(self._settings) as rollout:
            while True:
                serving = (await rollout.status()).serving
                if serving.epoch == policy.epoch and serving.version >= policy.version:
                    return
                await asyncio.sleep(POLL_INTERVAL_S)  # wait: named by the caller

    async def _probe(
        self, trajectories: Sequence[Trajectory], results: dict[Item, Probed], on_progress: Callable[[int], object]
    ) -> None:
        turns: dict[Item, Trajectory] = {}
        for trajectory in trajectories:
            # Until its turns are known, a trajectory has one result, of turn 0.
            placeholder = results.pop((trajectory.id, 0), None)
            for item in list_probe_items(trajectory, every=False):
                turns[item] = trajectory
                if placeholder is not None:
                    results[item] = _failed_probe(item, placeholder.status, placeholder.status_detail)
        left = [item for item in turns if not is_finished(results[item])]
        async with Prober(self._settings, self.plan) as prober:

            async def probe(item: Item) -> Probed:
                try:
                    return await prober.probe(turns[item], item[1])
                except RefusedError as error:
                    return _failed_probe(item, Status.STATUS_INVALID_INPUT, str(error))
                except Exception as error:  # noqa: BLE001 - an unreadable trajectory must not end the training either
                    return _failed_probe(item, Status.STATUS_INTERNAL, str(error) or repr(error))

            async with aclosing(map_concurrently(left, probe, IN_FLIGHT)) as probing:
                async for item, probed in probing:
                    results[item] = probed
                    on_progress(sum(map(is_finished, results.values())))


async def _watch(work: Coroutine[Any, Any, None], timeout_s: float, check: Callable[[], None]) -> None:
    """Await `work` and call `check` periodically; if either raises, the end of the event loop cancels the rest."""
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(timeout_s):
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_INTERVAL_S)  # wait: named by the caller
            if not task.done():
                check()
    task.result()


def _failed_probe(item: Item, status: Status.ValueType, reason: str) -> Probed:
    return Probed(trajectory_id=item[0], turn=item[1], status=status, status_detail=reason)
