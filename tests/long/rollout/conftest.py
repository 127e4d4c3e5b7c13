"""Random models for tests of real engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_engine import CharCodec


@pytest.fixture(scope="session")
def char_codec() -> type[CharCodec]:
    return CharCodec


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A function seed → folder of a random model."""

    def make(seed: int) -> Path:
        from random_model import write_random_model  # imports torch

        return write_random_model(tmp_path_factory.mktemp(f"model-{seed}"), seed)

    return make
