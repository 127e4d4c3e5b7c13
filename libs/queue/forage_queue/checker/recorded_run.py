"""The operations of a run, by what they are about: what the rules of histories are checked against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from forage_queue.checker.operations import History, Operation

TRAINING = "trajectories"
"""The stream of groups that are trained on; those of validations have other names."""
LOSS = "lose_data"
"""What a test records when it takes data from the server: rules of a durable server do not hold across it."""
Attempt = tuple[str, int, int, int]
"""(stream, batch, position, attempt)"""


@dataclass(frozen=True)
class Limits:
    """What the settings of the run say; None where they are not known."""

    batch_size: int | None = None
    total_steps: int | None = None
    max_staleness: int | None = None
    batching: str = "strict"


class RecordedRun:
    """The operations of a run by what they are about."""

    def __init__(self, history: History, limits: Limits) -> None:
        self.limits = limits
        self.operations = history.operations
        self.losses = history.select(LOSS)
        self.publishes, self.loads = history.select("publish"), history.select("load")
        self.serves = history.select("serve")
        self.acknowledgements = history.select("acknowledge")
        self.finishes = history.select("finish")
        self.removals = history.select("discard", "reject")
        self.acquisitions = [one for one in history.select("acquire_epoch") if one.happened]
        self.issues: dict[Attempt, list[Operation]] = defaultdict(list)
        self.is_strict = limits.batching == "strict"
        self.positions: dict[int, dict[str, int]] = defaultdict(dict)
        self.slots: dict[str, tuple[int, int]] = {}
        """uid → (batch, position)"""
        for one in self.operations:
            if one.kind == "issue":
                if one.may_have_happened:
                    self.issues[attempt_of(one["stream"], one.fields)].append(one)
                if one["stream"] == TRAINING:
                    self.positions[one["batch"]][one["uid"]] = one["position"]
                    self.slots[one["uid"]] = one["batch"], one["position"]
        self.claims = _index_entries(history.select("claim_prompts", "take_over_prompts", "reclaim_prompts"))
        self.takes = _index_entries(history.select("claim_groups", "reclaim_groups"))

    @cached_property
    def acknowledged(self) -> dict[int, Operation]:
        """Step → its first acknowledgement that happened."""
        found: dict[int, Operation] = {}
        for one in self.acknowledgements:
            if one.happened:
                found.setdefault(one["step"], one)
        return found

    @cached_property
    def counted(self) -> set[str]:
        """The uids that any step counts, as trained on or as dropped.

        Also of a step whose acknowledgement has no known result, but that of a later one has: so it happened.
        """
        known, last = self.acknowledged, max(self.acknowledged, default=0)
        found = [one for one in self.acknowledgements if one.happened]
        found += [one for one in self.acknowledgements if one["step"] < last and one["step"] not in known]
        return {uid for one in found for uid in (*one["uids"], *one["dropped"])}

    @property
    def outstanding(self) -> dict[int, list[int]]:
        """Batch → positions that were issued and are not acknowledged."""
        last = max(self.acknowledged, default=0) if self.is_strict else 0
        counted = {self.slots.get(uid) for uid in self.counted if not self.is_strict}
        later = {
            batch: {position for position in uids.values() if (batch, position) not in counted}
            for batch, uids in self.positions.items()
            if batch > last
        }
        return {batch: sorted(positions) for batch, positions in sorted(later.items()) if positions}

    def was_lost(self, first: Operation, second: Operation) -> bool:
        """Whether the server may have lost data between two operations."""
        return any(not loss.precedes(first) and not second.precedes(loss) for loss in self.losses)


def attempt_of(stream: str, fields: dict[str, Any]) -> Attempt:
    """What an operation of that stream is about."""
    return stream, fields["batch"], fields["position"], fields["attempt"]


def _index_entries(takes: Iterable[Operation]) -> dict[tuple[str, str], list[tuple[Operation, dict[str, Any]]]]:
    """(stream, entry id) → the operations that took the entry, and what it was."""
    found: dict[tuple[str, str], list[tuple[Operation, dict[str, Any]]]] = defaultdict(list)
    for one in takes:
        for entry in one["entries"]:
            found[one.fields.get("stream", TRAINING), entry["entry"]].append((one, entry))
    return found
