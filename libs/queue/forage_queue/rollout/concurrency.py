"""How many groups a dispatcher has in flight: as many as its engines find room for, up to a ceiling.

More groups keep an engine's batch full while others search, are scored, or wait for the slowest of their group. Too
many evict each other's keys and values, which the engine then computes again. Where that begins depends on model,
lengths, searches and GPUs; so it is found by trying, as a sender of TCP finds the width of a path (additive increase,
multiplicative decrease; Chiu and Jain, 1989):

- *Up* while the limit holds prompts back and the engines have next to no queue and free cache: twofold before the
  first cut, by a sixteenth after it.
- *Down* by a quarter where an engine has evicted sequences that ran. What was begun before still runs: the next cut
  waits until no more groups than the limit are in flight, and for some looks more.
- Else it stays.

The limit is never below one group and bounds only what is claimed. No group is stopped, and prompts that are not
claimed stay on the stream for later; so a batch always comes to its end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from forage_runtime.settings import RolloutSettings
from forage_runtime.telemetry.logs import get_logger

log = get_logger()
Reason = Literal["room", "evictions", "rest", "queue", "cache", "prompts", "ceiling", "engines"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why the limit moved at the last look (room: up; evictions: down) or stays: after a cut; the engines have a queue, or
their cache is nearly full; fewer prompts than the limit; another limit holds; no engine works or answers."""
Counts = Mapping[tuple[str, ...], float]
"""A count's name and the values of its labels → the count."""
AskCounts = Callable[[], Awaitable[Mapping[str, Counts]]]
"""Asks the engines that run: the name of each → its counts, as in a `Snapshot`."""
LOOK_S = 1.0
"""Between two looks; longer where there are many engines, see `_ASKED_A_SECOND`."""
GROWTH, STEP, CUT = 2.0, 1 / 16, 3 / 4
REST_LOOKS = 5
QUEUE_SHARE = 0.1
"""Of the sequences that the engines run at once: a queue so long keeps their batches full, a longer one only waits."""
CACHE_SHARE = 0.9
_OVERCOMMIT = 4
"""Trajectories in flight for each that an engine can run at once: many wait for a search, or have ended and wait for
the slowest of their group."""
_ASKED_A_SECOND = 20.0
_ASK_TIMEOUT_S = 5.0


def count_most_trajectories(rollout: RolloutSettings) -> int:
    """Trajectories that one dispatcher has in flight at most."""
    slots = rollout.engine.max_num_seqs * rollout.engine_replicas.max
    return rollout.max_trajectories_in_flight or _OVERCOMMIT * slots


def count_most_groups(rollout: RolloutSettings) -> int:
    """Groups of `rollout.n` samples that one dispatcher has in flight at most."""
    return max(1, min(rollout.max_groups_in_flight, count_most_trajectories(rollout) // rollout.n))


@dataclass(frozen=True)
class EngineLoad:
    """The work of one engine.

    Attributes:
        waiting: sequences in its queue.
        evictions: of sequences that ran, since it started.
        cache_used: share of its cache that running sequences hold.
        works: it is neither paused nor asleep nor out of service.
    """

    waiting: int = 0
    evictions: int = 0
    cache_used: float = 0.0
    works: bool = True

    @classmethod
    def from_counts(cls, counts: Counts) -> EngineLoad:
        """Read what an engine reports for its metrics."""

        def read(name: str) -> float:
            return counts.get((name,), 0.0)

        return cls(
            waiting=int(read("requests_waiting")),
            evictions=int(read("evictions")),
            cache_used=read("cache_tokens_used") / max(1.0, read("cache_tokens")),
            works=not any(map(read, ("paused", "asleep", "out_of_service"))),
        )


class GroupLimit:
    """The limit of one dispatcher, moved by what each look finds. No clock and no I/O.

    Attributes:
        groups: most groups in flight now.
        reason: why it moved at the last look, or stays.
        raised, lowered: how often it moved.
    """

    def __init__(self, ceiling: int, first: int, slots: int) -> None:
        """
        Args:
            ceiling: most groups ever.
            first: groups to begin with.
            slots: sequences that one engine runs at once.
        """
        self._ceiling = ceiling
        self._slots = slots
        self.groups = min(ceiling, max(1, first))
        self.reason: Reason = "room"
        self.raised = self.lowered = 0
        self._evictions: dict[str, int] = {}
        self._rest = 0
        self._is_above = False

    def look(self, loads: Mapping[str, EngineLoad], in_flight: int, is_full: bool) -> None:
        """Move the limit.

        Args:
            loads: engine → its work now; a process that is started again has another name.
            in_flight: groups now.
            is_full: whether this limit has held prompts back since the last look.
        """
        evicted = self._count_evictions(loads)
        self._is_above &= in_flight > self.groups
        self._rest -= bool(self._rest and not self._is_above)
        working = [load for load in loads.values() if load.works]
        if evicted and not self._rest:
            self._lower(in_flight, evicted)
            return
        self.reason = self._find_reason(working, is_full)
        if self.reason == "room":
            self._raise()

    def _find_reason(self, working: list[EngineLoad], is_full: bool) -> Reason:
        if self._rest:
            return "rest"
        if not working:
            return "engines"
        if sum(load.waiting for load in working) > QUEUE_SHARE * self._slots * len(working):
            return "queue"
        if max(load.cache_used for load in working) > CACHE_SHARE:
            return "cache"
        if self.groups == self._ceiling:
            return "ceiling"
        return "room" if is_full else "prompts"

    def _count_evictions(self, loads: Mapping[str, EngineLoad]) -> int:
        """Evictions since the last look; those of an engine that is new are of nobody knows when."""
        before, self._evictions = self._evictions, {name: load.evictions for name, load in loads.items()}
        return sum(max(0, now - before.get(name, now)) for name, now in self._evictions.items())

    def _lower(self, in_flight: int, evicted: int) -> None:
        before, self.groups = self.groups, max(1, math.floor(CUT * min(self.groups, max(1, in_flight))))
        self._rest, self._is_above = REST_LOOKS, in_flight > self.groups
        self.reason = "evictions"
        if self.groups < before:
            self.lowered += 1
            log.info("fewer_groups_in_flight", limit=self.groups, before=before, evicted=evicted)

    def _raise(self) -> None:
        step = (GROWTH - 1) * self.groups if not self.lowered else STEP * self.groups
        self.groups = min(self._ceiling, self.groups + max(1, math.floor(step)))
        self.raised += 1


class Concurrency:
    """Looks at the engines and moves the limit of a dispatcher, for as long as that works.

    Args:
        ask_counts: None where the engines cannot be asked: the limit is the ceiling.
        on_change: called after the limit has moved.
    """

    def __init__(self, rollout: RolloutSettings, ask_counts: AskCounts | None, on_change: Callable[[], None]) -> None:
        ceiling, slots = rollout.max_groups_in_flight, rollout.engine.max_num_seqs
        enough = math.ceil(slots * rollout.engine_replicas.min / rollout.n)  # as many as run at once, to begin with
        self.limit = GroupLimit(ceiling, enough if ask_counts else ceiling, slots)
        self._ask_counts = ask_counts
        self._on_change = on_change
        self._is_full = False

    def note_full(self) -> None:
        """Note that this limit, and no other one, holds prompts back."""
        self._is_full = True

    async def watch(self, in_flight: Callable[[], int]) -> NoReturn:
        """Look again and again while groups are in flight."""
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)  # wait: pause between two looks
            if self._ask_counts is None or not in_flight():
                continue
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    counts = await self._ask_counts()
            except Exception as error:  # noqa: BLE001 - an engine that is being replaced does not end the dispatcher
                log.debug("engines_not_asked", detail=f"{type(error).__name__}: {error}")
                counts = {}
            before, is_full, self._is_full = self.limit.groups, self._is_full, False
            self.limit.look(_read_loads(counts.items()), in_flight(), is_full)
            if self.limit.groups != before:
                self._on_change()
            pause_s = max(LOOK_S, len(counts) / _ASKED_A_SECOND)


def _read_loads(counts: Iterable[tuple[str, Counts]]) -> dict[str, EngineLoad]:
    return {name: EngineLoad.from_counts(one) for name, one in counts}
