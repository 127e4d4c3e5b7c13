"""A run's policies on their way to the engines: from the worker to an announcement, and again where one is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from forage_proto.v1.trajectory_pb2 import Policy
from forage_queue.streams.client import StreamClient
from forage_runtime.retries import RedisRetry
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import Settings
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.weights.snapshots import Snapshots, Worker
from forage_trajectory.trajectory import Group
from forage_weights.trainer.policy_store import PolicyStore
from forage_weights.trainer.publisher import Publisher
from forage_weights.trainer.refusals import Refusals


class Publication:
    """Publishes the worker's policy, at once or on a thread beside the next step.

    Args:
        hold: entered while the worker is asked: it may share its GPUs.
        openings, pad_id: as of `Snapshots`.

    Attributes:
        has_begun: whether the run had published a policy when this process began.
        announced: the version that was announced last; the one before it while the last one is on its way.

    Raises:
        UserError: as `Publisher.open`.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        worker: Worker,
        retry: RedisRetry,
        health: Health,
        hold: Callable[[], AbstractContextManager[Any]],
        signatures: RunSignatures,
        openings: Sequence[Sequence[int]],
        pad_id: int,
    ) -> None:
        self._streams, self._retry = streams, retry
        folder, uri = settings.run.folder / "policies", settings.trainer.publish.uri
        self.has_begun = any(folder.glob("v*"))
        self._store = PolicyStore(folder, uri, settings.run.id, retry.storage)
        self._publisher = Publisher.open(settings, self._store, streams, retry, signatures)
        self._snapshots = Snapshots(settings, worker, partial(retry, streams.read_dtype), hold, openings, pad_id)
        self._refusals = Refusals(streams, retry, health)
        self._newest = 0
        self.announced = 0

    def find_highest_epoch(self) -> int:
        """See `PolicyStore.find_highest_epoch`."""
        return self._store.find_highest_epoch()

    def add_turn(self, groups: Iterable[Group]) -> None:
        """See `Snapshots.add_turn`."""
        self._snapshots.add_turn(groups)

    def publish(self, version: int, whole: bool = False) -> Policy:
        """Publish the policy and return once it is announced; raises as `Publisher.publish`."""
        self._newest = version
        policy = self._publisher.publish(version, *self._snapshots.take(), whole)
        self.announced = version
        return policy

    def begin(self, version: int) -> Policy:
        """Publish the policy on a thread; returns what is known of it. The one before must be settled.

        Raises:
            FencedError: a newer trainer has taken over.
        """
        self._newest = version
        self._retry(self._streams.check_epoch)
        self._publisher.begin(version, *self._snapshots.take())
        return Policy(version=version, epoch=self._streams.epoch)

    def settle(self, wait: bool) -> Policy | None:
        """See `Publisher.settle`."""
        policy = self._publisher.settle(wait)
        if policy is not None:
            self.announced = policy.version
        return policy

    def check_refusals(self) -> None:
        """See `Refusals.check`."""
        self._refusals.check()

    @property
    def canary_diff(self) -> float | None:
        """See `Refusals.canary_diff`."""
        return self._refusals.canary_diff

    def mend(self) -> None:
        """While no groups come: announce the last policy again if the server has lost it, publish it again if the
        engines cannot load it. One that is on its way is left alone: what holds it up is named by its own waits."""
        if self.announced < self._newest:
            return
        self._publisher.announce_again()
        if self._publisher.is_damaged() or self._refusals.is_to_be_published_again():
            # An engine that starts now could not load it, and without engines no later policy would take its place.
            get_logger().warning("policy_published_again", version=self._newest)
            self.publish(self._newest, whole=True)

    def close(self) -> None:
        """See `Publisher.close`."""
        self._publisher.close()
