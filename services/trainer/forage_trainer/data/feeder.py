"""Issues the prompts of coming batches, never more than may be outstanding."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from forage_common.settings import Settings
from forage_common.streams.client import StreamClient
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Prompt, Purpose, Sampling, TrajectoryGroup
from forage_trainer.data import spans
from forage_trainer.data.dataset import Batches, refill_of
from forage_trainer.data.selection import equal_groups
from forage_trainer.waiting import Insist

ISSUED = Counter("forage_trainer_prompts_issued_total", "Prompts put on the stream", ["purpose"])
BOUND = Gauge("forage_trainer_max_staleness", "Policy versions that may lie between sampling and training")


def sampling_seed(run_seed: int, batch: int, position: int, attempt: int) -> int:
    """A seed of 48 bits, never 0 (which would mean unseeded), for the group at this place."""
    name = f"{run_seed}/{batch}/{position}/{attempt}".encode()
    return 1 + int.from_bytes(hashlib.sha256(name).digest()[:6], "big")


class Feeder:
    """Batch b is issued once version b - 1 - max_staleness exists, so no token can be staler than that."""

    def __init__(self, settings: Settings, streams: StreamClient, batches: Batches, insist: Insist) -> None:
        self._settings = settings
        BOUND.set(settings.trainer.max_staleness)
        self._streams = streams
        self._batches = batches
        self._insist = insist
        self._next: int | None = None
        self._version = 0

    def issue_up_to_bound(self, version: int) -> Sequence[int]:
        """Issue all batches that may be outstanding when the policy has `version`; returns their numbers.

        What was issued before, in this life or an earlier one, is not issued again.
        """
        trainer = self._settings.trainer
        self._version = version
        last = min(version + 1 + trainer.max_staleness, trainer.total_training_steps)
        first = version + 1 if self._next is None else self._next
        issued = range(first, last + 1)
        for batch in issued:
            for position in range(self._batches.batch_size):
                self.issue(batch, position, attempt=0, version=version)
        self._next = max(first, last + 1)
        return issued

    def reissue(self, group: TrajectoryGroup) -> None:
        """Issue the question of a group once more, to be generated under the present policy or later."""
        self._again(group, refill_of(group.group_uid))

    def refill(self, group: TrajectoryGroup) -> bool:
        """Issue another question in the place of a group whose rewards are all equal; False: it is to be kept."""
        trainer = self._settings.trainer
        refill = refill_of(group.group_uid) + 1
        if refill > trainer.max_refills or not equal_groups([group], trainer.algorithm.adv_estimator):
            return False
        self._again(group, refill)
        return True

    def _again(self, group: TrajectoryGroup, refill: int) -> None:
        version = max(self._version, group.batch - 1 - self._settings.trainer.max_staleness)
        self.issue(group.batch, group.position, group.attempt + 1, version, refill)

    def issue(self, batch: int, position: int, attempt: int, version: int, refill: int = 0) -> None:
        """Issue one group of a batch, to be generated under `version` or later.

        Args:
            refill: which question of this place, see `Batches.group`.
        """
        uid, question = self._batches.group(batch, position, refill)
        settings = self._settings
        prompt = Prompt(
            run_id=settings.run.id,
            group_uid=uid,
            data_source=question.data_source,
            messages=question.messages,
            ground_truth=question.ground_truth,
            samples=settings.rollout.n,
            sampling=Sampling(
                temperature=settings.rollout.temperature,
                top_p=settings.rollout.top_p,
                top_k=max(0, settings.rollout.top_k),
                seed=sampling_seed(settings.run.seed, batch, position, attempt),
            ),
            purpose=Purpose.PURPOSE_TRAIN,
            batch=batch,
            position=position,
            min_policy_version=version,
            attempt=attempt,
            issued_unix_ms=int(time.time() * 1000),
            reply_stream=self._streams.trajectories,
        )
        with spans.issuing(prompt):
            issued = self._insist(lambda: self._streams.issue(prompt))
        if issued:
            ISSUED.labels("train").inc()
            get_logger().debug("prompt_issued", group=uid, batch=batch, position=position, attempt=attempt)
