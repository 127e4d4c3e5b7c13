"""The ledger of a run: how many prompt groups were issued, trained on, lost and duplicated."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from forage_queue.streams.client import StreamClient


@dataclass(frozen=True)
class GroupCounts:
    """Counts of prompt groups. After the end of a run `groups_lost` and `groups_duplicated` must be 0."""

    groups_issued: int
    groups_trained: int
    groups_lost: int
    groups_duplicated: int


def count_groups(client: StreamClient) -> GroupCounts:
    """Compare the groups issued for training with those that the ledger records as consumed."""
    # A position may have been issued several times, with other questions too: one of its groups is consumed.
    issued: dict[tuple[int, int], set[str]] = defaultdict(set)
    for issue in client.read_issued():
        issued[issue.batch, issue.position].add(issue.group_uid)
    consumed = Counter(uid for entry in client.read_ledger().values() for uid in entry.group_uids)
    return GroupCounts(
        groups_issued=len(issued),
        groups_trained=consumed.total(),
        groups_lost=sum(groups.isdisjoint(consumed) for groups in issued.values()),
        groups_duplicated=sum(count - 1 for count in consumed.values()),
    )
