"""Placement of a group's generations on one replica, so that they share a prefix cache: pure functions, no Ray.

Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018): every caller ranks the
replicas of a name alike without talking to the others, a replica that comes or goes moves only its own share of the
names, and a replica with more than its share of the load leaves the excess to the next in the ranking.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

LOAD_FACTOR = 1.25
"""A replica may have this many times the average load."""
MIN_CAPACITY = 32
"""A replica with fewer requests is never full: groups stay together while the load is low."""


def rank_replicas(name: str, replicas: Iterable[str]) -> list[str]:
    """The replicas in the order in which the name prefers them."""
    return list(_rank(name, frozenset(replicas)))


@lru_cache(maxsize=4096)  # each generation of a group asks again
def _rank(name: str, replicas: frozenset[str]) -> tuple[str, ...]:
    def hash_pair(replica: str) -> bytes:
        return hashlib.blake2b(f"{replica}\n{name}".encode(), digest_size=8).digest()

    return tuple(sorted(replicas, key=hash_pair, reverse=True))


def order_replicas(name: str, loads: Mapping[str, int]) -> list[str]:
    """The replicas in the order in which a request should try them.

    Replicas below capacity come first, in the order of `rank_replicas`; then the rest, the least loaded first.
    Without a name the load alone decides.

    Args:
        loads: replica → requests in flight.
    """
    by_load = sorted(loads, key=lambda replica: loads[replica])
    if not name:
        return by_load
    capacity = max(MIN_CAPACITY, math.ceil(LOAD_FACTOR * (sum(loads.values()) + 1) / max(1, len(loads))))
    preferred = [replica for replica in rank_replicas(name, loads) if loads[replica] < capacity]
    return preferred + [replica for replica in by_load if loads[replica] >= capacity]
