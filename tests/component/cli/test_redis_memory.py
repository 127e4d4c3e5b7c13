"""The estimate of a recipe's memory in Redis, compared with groups at the recipe's limits on a real server."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
import redis

from forage_cli.local.redis.memory import check_redis
from forage_cli.planning.streams import estimate_stream_memory
from forage_proto.v1.trajectory_pb2 import ActionKind, Prompt, Role, Trajectory, TrajectoryGroup
from forage_queue.streams.client import StreamClient
from forage_runtime.settings import RedisSettings, Settings, load_settings
from forage_trajectory.codec import pack_group

VOCABULARY = 152_000  # of Qwen2.5: most ids take three bytes
LIMITS = ["rollout.max_start_length=512", "rollout.max_response_length=120", "rollout.max_obs_length=500"]
RANDOM = random.Random(7)


def write_text(tokens: int) -> str:
    return "".join(RANDOM.choice([" the", " of", "ing", " capital", ", ", " 1998", " Mongolia"]) for _ in range(tokens))


def make_trajectory(prompt: int, generated: int, observed: int, turns: int) -> Trajectory:
    """A trajectory with every part at its limit, with the fields that the rollout service fills."""
    trajectory = Trajectory(id="run/nq/train/12345/0/3", run_id="run", group_uid="nq/train/12345/0", data_source="nq")
    trajectory.trace_id, trajectory.prompt_length = "0" * 32, prompt
    trajectory.spans.add(role=Role.ROLE_PROMPT, end=prompt, implied=True)
    for number in range(1, turns + 2):
        trajectory.loss_mask.extend([1] * generated)
        trajectory.turn_ids.extend([number] * generated)
        trajectory.logprobs.extend(-RANDOM.random() for _ in range(generated))
        end = prompt + len(trajectory.loss_mask)
        trajectory.spans.add(role=Role.ROLE_MODEL, begin=end - generated, end=end, implied=True)
        turn = trajectory.turns.add(index=number, action=ActionKind.ACTION_KIND_SEARCH, content=write_text(12))
        if number > turns:
            break
        trajectory.loss_mask.extend([0] * observed)
        trajectory.turn_ids.extend([-1] * observed)
        trajectory.logprobs.extend([0.0] * observed)
        end = prompt + len(trajectory.loss_mask)
        trajectory.spans.add(role=Role.ROLE_ENV, begin=end - observed, end=end, implied=True)
        for place in range(3):
            document = turn.documents.add(
                id=str(RANDOM.randrange(10**7)), contents=write_text(3), score=RANDOM.random()
            )
            document.quote.begin, document.quote.length = 700 * place, 700
        turn.provenance.index_digest = turn.provenance.corpus_digest = turn.provenance.encoder_digest = "a" * 64
    count = prompt + len(trajectory.loss_mask)
    trajectory.token_ids.extend(int(VOCABULARY * RANDOM.random() ** 2) for _ in range(count))
    return trajectory


def test_the_estimate_bounds_groups_at_their_limits(redis_server: RedisSettings) -> None:
    settings = load_settings(None, ["data.train_batch_size=8", "rollout.n=4", "rollout.max_turns=3", *LIMITS], {})
    client = StreamClient(redis_server, "run")
    client.create_groups()
    client.acquire_epoch()
    for position in range(8):
        client.issue(Prompt(group_uid=f"uid-{position}", batch=1, position=position))
    for entry in client.claim_prompts("worker", 8, 0.1):
        group = TrajectoryGroup(group_uid=entry.message.group_uid, batch=1, position=entry.message.position)
        group.trajectories.extend(make_trajectory(512, 120, 500, 3) for _ in range(4))
        client.finish(entry, pack_group(group))
    measured = client.measure_bytes(client.trajectories)
    estimated = estimate_stream_memory(settings).batch
    assert measured <= estimated <= 1.3 * measured, f"measured {measured}, estimated {estimated}"


def test_more_steps_between_checkpoints_and_validation_questions_need_more(tmp_path: Path) -> None:
    file = tmp_path / "val.parquet"
    parquet.write_table(pyarrow.table({"number": list(range(100))}), file)

    def estimate(*more: str) -> tuple[int, int]:
        found = estimate_stream_memory(load_settings(None, [f"data.val_files=[{file}, {tmp_path}/none]", *more], {}))
        return found.training // found.batch, found.validation

    steps, validation = estimate("trainer.save_freq=5", "trainer.max_staleness=1")
    assert steps == 8
    assert estimate("trainer.save_freq=10", "trainer.max_staleness=0") == (12, validation)
    assert estimate("data.val_max_samples=50")[1] == validation // 2
    assert estimate("data.train_batch_size=5", "rollout.n=4")[1] == validation // 5, "no more are outstanding"


@pytest.fixture
def settings(redis_server: RedisSettings) -> Settings:
    return load_settings(None, [f"redis.url={redis_server.url}", "data.val_files=[]", "data.train_batch_size=512"], {})


def test_a_server_without_a_limit_has_room(settings: Settings) -> None:
    assert check_redis(settings) == []


def test_a_server_that_is_too_small_or_not_durable_is_named(settings: Settings) -> None:
    server = redis.Redis.from_url(settings.redis.url)
    server.config_set("maxmemory", "100mb")
    server.config_set("appendfsync", "no")
    durable, limit, maxmemory = check_redis(settings)
    assert "set appendfsync always" in durable
    assert "redis.max_stream_bytes is 50 MiB, and groups take up to" in limit
    assert "saves checkpoints more often than trainer.save_freq" in limit
    assert "Redis has a maxmemory of 100 MiB" in maxmemory
    wanted = maxmemory.rpartition(" ")[2]
    assert wanted == f"{-(-estimate_stream_memory(settings).maxmemory // 2**20)}mb"
    server.config_set("maxmemory", wanted)
    server.config_set("appendfsync", "always")
    assert check_redis(settings) == [], "the size that the sentence gives suffices"
