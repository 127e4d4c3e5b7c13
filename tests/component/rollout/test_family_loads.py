"""Families whose layers vLLM packs or copies are served, after a load in place, as by an engine started afresh."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_loads import measure_families

pytestmark = pytest.mark.timeout(600)


def test_a_load_in_place_gives_what_a_fresh_start_gives(tmp_path: Path) -> None:
    """Packed experts, sinks copied into the implementation of attention, and a view of a convolution's weights."""
    measure_families(["qwen3_moe", "gpt_oss", "mamba2"], tmp_path)
