"""How long 7B and 70B would take to be served: arithmetic, from rates that `rates.py` measured on this machine.

Measured: bytes a second of each part on one core, and the share of a delta. Assumed: the machines in `Site`, that each
part scales with cores up to the bandwidth of memory, and that no two parts overlap, though several do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from forage_weights.direct import MOST_TRANSFERS

MODELS = {"7B": 7.6e9, "70B": 70.6e9}
"""Parameters."""
NODES = (1, 8, 64)


@dataclass(frozen=True)
class Site:
    """Machines that are assumed; bytes a second.

    Attributes:
        file_system: of the shared file system, all readers and writers together.
        link: of one machine's network.
        bus: from a machine's memory to one of its GPUs; each GPU takes its part of a tensor-parallel policy at once.
        cores: that hash, encode and patch.
        memory: bound of what all cores of a machine read together.
    """

    file_system: float = 2e9
    link: float = 3e9
    bus: float = 20e9
    cores: int = 32
    memory: float = 50e9

    def scale(self, rate: float) -> float:
        """The rate of all cores, from that of one."""
        return min(rate * self.cores, self.memory)


@dataclass(frozen=True)
class Estimate:
    """Seconds from the call of the publisher until the last engine serves the policy, by way."""

    model: str
    nodes: int
    before: float
    files_whole: float
    files_delta: float
    direct_whole: float
    direct_delta: float


def estimate(rates: Mapping[str, float], share: float, site: Site | None = None) -> list[Estimate]:
    """Estimate each model on each number of engine nodes.

    Args:
        rates: of `rates.py` on one core.
        share: bytes of a delta over those of its policy.
    """
    site = site or Site()
    hashing, encoding, patching, finding = (site.scale(rates[part]) for part in ("hash", "encode", "patch", "finite"))
    result = []
    for model, parameters in MODELS.items():
        size, masters = 2 * parameters, 4 * parameters
        check = size / hashing + size / finding  # on every engine node at once
        whole = size / hashing + size / site.file_system  # hashed and written by the trainer
        delta = size / hashing + size / encoding + share * size / site.file_system
        patch = share * size / site.file_system + size / patching + check
        for nodes in NODES:
            copies = count_copies(nodes)
            result.append(
                Estimate(
                    model,
                    nodes,
                    before=(1 + nodes) * masters / site.file_system + 2 * masters / rates["sha256"],
                    files_whole=whole + nodes * size / site.file_system + check + size / site.bus,
                    files_delta=delta + (nodes - 1) * share * size / site.file_system + patch,
                    direct_whole=whole + copies * size / site.link + check + size / site.bus,
                    direct_delta=delta + (copies / site.link - 1 / site.file_system) * share * size + patch,
                )
            )
    return result


def count_copies(nodes: int) -> int:
    """Count the copies that one link carries one after the other until all nodes have one: they send theirs on."""
    copies, senders, left = 0, 1, nodes
    while left:
        served = min(left, MOST_TRANSFERS * senders)
        copies += math.ceil(served / senders)
        senders, left = senders + served, left - served
    return copies
