"""The books of a run: which groups were issued, which were trained on, and how often."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from forage_common.streams.client import StreamClient
from forage_common.v1.trajectory_pb2 import Purpose


@dataclass(frozen=True)
class GroupCounts:
    """Counts of prompt groups. Nothing is lost when a run has ended and `groups_lost` is 0."""

    groups_issued: int
    groups_trained: int
    groups_lost: int
    groups_duplicated: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def count_groups(client: StreamClient) -> GroupCounts:
    """Compare what was issued for training with what the ledger says was eaten."""
    issued = set()
    for name, uid in client.read_issued().items():
        purpose, batch, _position, _attempt = name.split("/")
        if int(purpose) == Purpose.PURPOSE_TRAIN:
            issued.add((int(batch), uid))
    eaten = Counter((step, uid) for step, entry in client.read_ledger().items() for uid in entry.group_uids)
    uids = Counter(uid for _, uid in eaten.elements())
    return GroupCounts(
        groups_issued=len(issued),
        groups_trained=len(eaten),
        groups_lost=len(issued - set(eaten)),
        groups_duplicated=sum(count - 1 for count in uids.values()),
    )
