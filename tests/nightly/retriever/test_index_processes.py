"""Parts of a build that fail in their processes, in ways that are rarer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from index_work import fail_when_begun, wait_for_ever

from forage_retriever.index.building.processes import run_all
from forage_runtime.errors import UserError


@pytest.mark.parametrize(
    ("kind", "sentence"), [("user", "shard 1: out of luck"), ("bug", "shard 1: ZeroDivisionError: out of luck")]
)
def test_the_first_that_fails_stops_the_others(tmp_path: Path, kind: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run_all([partial(wait_for_ever, tmp_path), partial(fail_when_begun, tmp_path, kind)], 2, lambda *_: None)
    assert (tmp_path / "unwound").exists()
