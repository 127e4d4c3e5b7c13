"""The trainer's end of the streams, and a rollout service that answers every prompt at once: steps without updates.

python -m fuzz.programs.batches REDIS_URL
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from functools import partial

import redis
from trainer_parts import make_group

from forage_proto.v1.trajectory_pb2 import GroundTruth
from forage_queue.streams.client import StreamClient
from forage_queue.streams.payloads import Payloads
from forage_queue.trainer.batcher import Batcher, UnackedSteps
from forage_queue.trainer.feeder import Batches, Feeder
from forage_records.questions import Question
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import RedisSettings, Settings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import configure_logs
from forage_trainer.data.tensors import build_step_tensors, has_equal_rewards, leave_out_unusable, select_trajectories
from forage_trainer.reporting.metrics import compute_trajectory_metrics
from forage_trajectory.codec import pack_group

_SIZE = 2
_PAUSE_S = 0.02


def main(url: str) -> None:
    configure_logs("trainer", "ERROR")
    overrides = [f"redis.url={url}", "run.id=fuzz", "run.dir=runs", f"data.train_batch_size={_SIZE}"]
    settings = load_settings(None, [*overrides, "trainer.total_training_steps=1000000000"], {})
    streams = StreamClient(settings.redis, settings.run.id, 10.0, payloads=Payloads(settings))
    streams.create_groups()
    epoch, health = streams.acquire_epoch(), Health()
    streams.offer_payloads()
    retry = RedisRetry(Stop(), health)
    rows = tuple(Question("q", "train", i, (), GroundTruth(targets=[str(i)]), str(i)) for i in range(40))
    equal = partial(has_equal_rewards, estimator=settings.trainer.algorithm.adv_estimator)
    feeder = Feeder(settings, streams, Batches(rows, _SIZE, 0), retry, equal)
    batcher = Batcher(streams, _SIZE, settings.trainer, feeder, retry, health)
    pending = UnackedSteps(streams, retry)
    batcher.start(0)
    threading.Thread(target=_answer_prompts, args=(settings.redis,), daemon=True).start()
    redis.Redis.from_url(url).set("fuzz:ready", 1)
    for step in itertools.count(1):
        feeder.issue_up_to_bound(step - 1)
        batch = batcher.next_batch(step, 60.0)
        _compute(batch.groups, settings, step)
        pending.add(batch, epoch, ())
        batcher.mark_consumed(step)
        batcher.forget(pending.acknowledge(step), step)
        time.sleep(_PAUSE_S)


def _compute(groups: list, settings: Settings, step: int) -> None:  # type: ignore[type-arg]
    compute_trajectory_metrics(groups, step)
    groups, _ = leave_out_unusable(groups, settings.trainer)
    selected = select_trajectories(groups, settings.trainer.algorithm)
    build_step_tensors(selected, step, 1, 0, settings.trainer.algorithm)


def _answer_prompts(settings: RedisSettings) -> None:
    streams = StreamClient(settings, "fuzz", 10.0)
    while True:  # wait: the life of the program
        for entry in streams.claim_prompts("rollout", 10, 0.05):
            asked = entry.message
            group = make_group(
                asked.group_uid, [0.0, 1.0], asked.batch, asked.position, asked.attempt, asked.min_policy_version
            )
            streams.finish(entry, pack_group(group))


if __name__ == "__main__":
    main(sys.argv[1])
