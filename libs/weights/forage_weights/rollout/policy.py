"""Versions of published policies: which of two is newer, and their names in vLLM. No engine is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.errors import ForageError


class NotServingError(ForageError):
    """This engine does not generate until it has loaded a policy or was started again."""


class EngineLostError(NotServingError):
    """This engine died while it generated: what it had sampled is lost."""


class EngineHangsError(RuntimeError):
    """The engine has sampled nothing for too long although requests are running."""


def is_newer(candidate: Policy, serving: Policy | None) -> bool:
    """Whether the candidate replaces the served policy without being announced.

    The epoch decides first: policies of a trainer that was replaced do not come back, whatever their version.
    """
    return serving is None or (candidate.epoch, candidate.version) > (serving.epoch, serving.version)


def find_oldest(policies: Sequence[Policy | None], announced: Policy | None) -> Policy | None:
    """The policy that every engine has reached; None where an engine has none, or there are no engines.

    Policies of another epoch than the announced one count as older than all of it, even those of a higher epoch.
    """
    served = [policy for policy in policies if policy is not None]
    if not served or len(served) < len(policies):
        return None
    epoch = None if announced is None else announced.epoch
    return min(served, key=lambda policy: (policy.epoch == epoch, policy.epoch, policy.version))


def format_label(policy: Policy) -> str:
    """The policy as vLLM's weight version, which comes back with sampled tokens; `parse_label` reads it."""
    return f"{policy.version}@{policy.epoch}"


def parse_label(text: str) -> tuple[int, int]:
    """(version, epoch) of a version string; (0, 0) for weights that were never published."""
    version, at, epoch = text.partition("@")
    return (int(version), int(epoch)) if at else (0, 0)
