"""The ledger of a run: how many prompt groups were issued, trained on, lost and duplicated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from forage_common.streams.client import StreamClient
from forage_common.v1.trajectory_pb2 import Purpose


@dataclass(frozen=True)
class GroupCounts:
    """Counts of prompt groups. After the end of a run `groups_lost` and `groups_duplicated` must be 0."""

    groups_issued: int
    groups_trained: int
    groups_lost: int
    groups_duplicated: int


def count_groups(client: StreamClient) -> GroupCounts:
    """Compare the groups issued for training with those that the ledger records as consumed."""
    issued = set()
    for name, uid in client.read_issued().items():
        purpose, batch, _position, _attempt = name.split("/")
        if int(purpose) == Purpose.PURPOSE_TRAIN:
            issued.add((int(batch), uid))
    consumed = Counter((step, uid) for step, entry in client.read_ledger().items() for uid in entry.group_uids)
    uids = Counter(uid for _, uid in consumed.elements())
    return GroupCounts(
        groups_issued=len(issued),
        groups_trained=len(consumed),
        groups_lost=len(issued - set(consumed)),
        groups_duplicated=sum(count - 1 for count in uids.values()),
    )
