"""The memory that a recipe needs in Redis, and what a server gives it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pyarrow
import pyarrow.parquet as parquet

from forage_common.errors import SettingsError, UnavailableError
from forage_common.settings import Settings
from forage_common.streams.client import StreamClient
from forage_common.streams.durability import check_durability

# Bytes of a token in a group, measured (tests/unit/cli/test_redis_memory.py): its id, log-probability, mask, turn and
# text. The text of an observation is there twice, as tokens and as documents.
_PROMPT, _GENERATED, _OBSERVED = 7.5, 13.5, 27.5
_TRAJECTORY = 1000
_PROBE_S = 2.0


@dataclass(frozen=True)
class StreamMemory:
    """What groups take in Redis at most, in bytes: where every prompt, generation and observation is at its limit.

    Attributes:
        batch: one batch.
        training: the batches between two checkpoints, and those issued ahead.
        validation: the answers of a validation that the trainer has not stored in its run folder yet.
    """

    batch: int
    training: int
    validation: int

    @property
    def maxmemory(self) -> int:
        """The maxmemory that suffices: training may take half of it by default, and a validation takes less."""
        return 2 * self.training

    def __str__(self) -> str:
        return (
            f"groups take up to {format_bytes(self.training)} in Redis, answers of a validation"
            f" {format_bytes(self.validation)}: maxmemory {format_maxmemory(self.maxmemory)} suffices"
        )


def estimate_stream_memory(settings: Settings) -> StreamMemory:
    """Estimate the memory of a recipe's groups. Validation files that cannot be read count as empty."""
    rollout, trainer, data = settings.rollout, settings.trainer, settings.data
    trajectory = int(
        _TRAJECTORY
        + _PROMPT * rollout.max_start_length
        + _GENERATED * rollout.max_response_length * (rollout.max_turns + 1)
        + _OBSERVED * rollout.max_obs_length * rollout.max_turns
    )
    batch = trajectory * rollout.n * data.train_batch_size
    questions = 0
    for file in data.val_files:
        try:
            questions += parquet.read_metadata(file).num_rows
        except (OSError, pyarrow.ArrowInvalid):
            continue
    if data.val_max_samples >= 0:
        questions = min(questions, data.val_max_samples)
    outstanding = min(questions, data.train_batch_size * rollout.n)  # as many as the trainer issues at once
    steps = trainer.save_freq + 1 + trainer.max_staleness + 1  # one while the checkpoint becomes durable, one in hand
    return StreamMemory(batch, batch * steps, trajectory * outstanding)


def check_redis(settings: Settings) -> list[str]:
    """Check the server, if it answers, and what it may hold of the recipe's groups; one sentence per problem."""
    memory = estimate_stream_memory(settings)
    limit, maxmemory, problems = settings.redis.max_stream_bytes, 0, []
    try:
        section = settings.redis.model_copy(update={"timeout_s": min(_PROBE_S, settings.redis.timeout_s)})
        client = StreamClient(section, settings.run.id, patience_s=1)
        problems = [f"Redis can lose what it has acknowledged: {text}" for text in check_durability(client, section)]
        limit, maxmemory = client.read_byte_limit(), int(client.read_server("memory")["maxmemory"])
    except UnavailableError:
        pass  # it need not run yet
    except SettingsError as error:
        problems.append(str(error))
    if limit and limit < memory.training:
        effect = "the trainer saves checkpoints more often than trainer.save_freq says"
        if limit < memory.batch:
            effect = "not even one batch fits, and training is slowed down"
        problems.append(
            f"redis.max_stream_bytes is {format_bytes(limit)}, and groups take up to {format_bytes(memory.training)}:"
            f" {effect}; raise it or the server's maxmemory, or lower trainer.save_freq"
        )
    if maxmemory and maxmemory < memory.training + memory.validation:
        problems.append(
            f"Redis has a maxmemory of {format_bytes(maxmemory)}, and groups of training and validation take up to"
            f" {format_bytes(memory.training + memory.validation)}: raise it to {format_maxmemory(memory.maxmemory)}"
        )
    return problems


def format_bytes(number: int) -> str:
    """Format a number of bytes for a reader: "512 MiB", "2.8 GiB"."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{math.ceil(number / 2**20)} MiB"


def format_maxmemory(number: int) -> str:
    """Format a number of bytes as the server's options take it: "5645mb"."""
    return f"{math.ceil(number / 2**20)}mb"
