"""What tests of real engines share: random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

TEXT = "the capital of France is Paris, the search for an answer"
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A function seed → folder of a random model."""

    def make(seed: int) -> Path:
        from random_model import write_random_model  # imports torch

        return write_random_model(tmp_path_factory.mktemp(f"model-{seed}"), seed, TEXT, **SIZES)

    return make
