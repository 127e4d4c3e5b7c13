"""The world facts are the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_cli.datasets.world.write import WorldSummary, build_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WorldSummary]:
    out = tmp_path_factory.mktemp("world")
    return out, build_world(out, seed=0)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones(
    world: tuple[Path, WorldSummary], tmp_path: Path
) -> None:
    out, summary = world
    again = build_world(tmp_path / "again", seed=0)
    assert again == summary
    for name in (*summary.digests, "manifest.json"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    other = build_world(tmp_path / "other", seed=1).digests
    assert other["corpus.jsonl"] == summary.digests["corpus.jsonl"]
    assert other["test.parquet"] != summary.digests["test.parquet"]
