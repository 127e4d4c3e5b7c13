"""What was issued is noted for each reply stream apart: two validations of one step ask the same questions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forage_proto.v1.trajectory_pb2 import Prompt
from forage_queue.streams.client import VALIDATION, StreamClient
from forage_runtime.settings import RedisSettings


def test_each_reply_stream_has_its_own_table_of_issues(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StreamClient(RedisSettings(), "run")
    tables = []

    def note(script: str, keys: Sequence[str], *arguments: str) -> int:
        tables.append(keys[1])
        return 1

    monkeypatch.setattr(client, "_run_fenced", note)
    for label in ("3-e1", "3-e2", "30-e1"):
        assert client.issue(Prompt(reply_stream=client.key(f"{VALIDATION}{label}"), batch=1))
    client.issue(Prompt(batch=1))
    assert len(set(tables)) == 4
