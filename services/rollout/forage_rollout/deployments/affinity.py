"""Which replica a group's generations go to, so that they meet in one prefix cache: plain arithmetic, no Ray.

Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018): every caller ranks the
replicas of a name alike without talking to the others, one replica more or less moves only its own share of the names,
and a replica with more than its share of the load passes what is too much on to the next in the ranking.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

LOAD_FACTOR = 1.25
# Below so many requests a replica is never too full for one more: a group stays together while there is little to do.
ROOM = 32


def ranked(name: str, replicas: Iterable[str]) -> list[str]:
    """The replicas in the order in which the name prefers them."""
    return sorted(replicas, key=lambda replica: _weight(name, replica), reverse=True)


def preferred(name: str, loads: Mapping[str, int]) -> list[str]:
    """The replicas in the order in which a request should try them.

    Those with room come first, in the order of `ranked`; then the rest, the least loaded first. Without a name it is
    the load alone that counts.

    Args:
        loads: replica → requests that it has.
    """
    by_load = sorted(loads, key=lambda replica: loads[replica])
    if not name:
        return by_load
    capacity = max(ROOM, math.ceil(LOAD_FACTOR * (sum(loads.values()) + 1) / max(1, len(loads))))
    roomy = [replica for replica in ranked(name, loads) if loads[replica] < capacity]
    return roomy + [replica for replica in by_load if loads[replica] >= capacity]


def _weight(name: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{replica}\n{name}".encode(), digest_size=8).digest()
