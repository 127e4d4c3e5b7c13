"""The memory that a recipe's groups need in Redis."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forage_runtime.settings import Settings

# Bytes of a token in a packed group, measured (tests/component/cli/test_redis_memory.py): its id, and the
# log-probability of a sampled one. Texts and documents are those of the tokens.
_PROMPT, _GENERATED, _OBSERVED = 2.6, 6.3, 2.6
_TRAJECTORY = 500


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
    import pyarrow  # here, because who only asks a question needs none
    import pyarrow.parquet as parquet

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


def format_bytes(number: int) -> str:
    """Format a number of bytes for a reader: "512 MiB", "2.8 GiB"."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{math.ceil(number / 2**20)} MiB"


def format_maxmemory(number: int) -> str:
    """Format a number of bytes as the server's options take it: "5645mb"."""
    return f"{math.ceil(number / 2**20)}mb"
