"""The attempts of user rewards to break out are real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from breakout_scorer import open_scorer, write_code
from breakout_targets import open_targets

from forage_proto.v1 import trajectory_pb2


@pytest.mark.parametrize(
    "attempt",
    [
        *("tcp", "udp", "unix", "abstract", "pair", "listen", "secret", "secret_by_link", "secret_by_root", "list"),
        *("chmod", "write", "create", "fork", "program", "variables", "parent_environment", "memory_file", "touch"),
    ],
)
def test_the_attempts_succeed_where_nothing_confines_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with open_targets(tmp_path / "secrets") as targets:
        user, score = open_scorer(write_code(tmp_path), targets, "off")
        assert score(attempt).status == trajectory_pb2.STATUS_OK, score(attempt).detail
        user.close()
