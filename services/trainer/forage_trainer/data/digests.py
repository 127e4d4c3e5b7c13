"""Digests that tell whether two runs are the same, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from forage_proto.v1.trajectory_pb2 import Policy
from forage_trainer.data.tensors import is_valid
from forage_trajectory.trajectory import Group


def digest_tokens(groups: Iterable[Group]) -> str:
    """SHA-256 of what a step may train on: place, tokens, mask, log-probabilities and reward of its valid trajectories.

    Not of ids, attempts, epochs and times, in which a run with failures differs from one without.
    """
    digest = hashlib.sha256()
    for group in groups:
        for trajectory in filter(is_valid, group.trajectories):
            digest.update(trajectory.digest)
    return digest.hexdigest()


def digest_weights(policy: Policy) -> str:
    """SHA-256 of a published policy: of its only file, or of the digests of all."""
    digests = [file.digest for file in policy.files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
