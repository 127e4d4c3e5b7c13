"""The report of a run asks Redis for what was lost."""

from __future__ import annotations

from forage_cli.runs.ledger import GroupCounts, count_groups
from forage_proto.v1.trajectory_pb2 import LedgerEntry, Prompt, Purpose
from forage_queue.streams.client import StreamClient
from forage_runtime.settings import RedisSettings


def test_lost_and_duplicated_groups_are_counted(redis_server: RedisSettings) -> None:
    client = StreamClient(redis_server, "books")
    client.create_groups()
    for batch in (1, 2, 3):
        for attempt in (0, 1):  # an issue repeated is still one group
            client.issue(Prompt(group_uid=f"g{batch}", batch=batch, attempt=attempt, purpose=Purpose.PURPOSE_TRAIN))
    client.issue(Prompt(group_uid="v", batch=1, purpose=Purpose.PURPOSE_VALIDATION, reply_stream="validation-before"))
    client.acknowledge(LedgerEntry(step=1, group_uids=["g1"]), [])
    client.acknowledge(LedgerEntry(step=2, group_uids=["g2"]), [])
    assert count_groups(client) == GroupCounts(3, 2, 1, 0)
    client.acknowledge(LedgerEntry(step=3, group_uids=["g3", "g1"]), [])
    assert count_groups(client) == GroupCounts(3, 4, 0, 1)
