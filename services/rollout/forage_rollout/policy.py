"""Published policies: what may be loaded, and which of two is newer. No engine here."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forage_common.errors import ForageError
from forage_common.model_folder import WEIGHTS, read_header
from forage_common.v1.trajectory_pb2 import Policy

_TIED_HEAD = "lm_head.weight"


class PolicyError(ForageError):
    """A published policy cannot be served: missing, altered, or of another shape."""


def is_newer(candidate: Policy, serving: Policy | None) -> bool:
    """Whether the candidate replaces what is served: a later epoch always does, an earlier one never."""
    return serving is None or (candidate.epoch, candidate.version) > (serving.epoch, serving.version)


def same(one: Policy | None, other: Policy | None) -> bool:
    """Whether both are the same publication."""
    return one is not None and other is not None and (one.epoch, one.version) == (other.epoch, other.version)


def label(policy: Policy) -> str:
    """The policy as an engine's version string; `parse_label` reads it back."""
    return f"{policy.version}@{policy.epoch}"


def parse_label(text: str) -> tuple[int, int]:
    """(version, epoch) of a version string; of weights that nobody published, (0, 0)."""
    version, at, epoch = text.partition("@")
    return (int(version), int(epoch)) if at else (0, 0)


def verify(policy: Policy, expected: dict[str, tuple[int, ...]]) -> Path:
    """The weights file of a published policy, after its digest and shapes were checked.

    Args:
        expected: `model_shapes` of the model that the engine was started with.

    Raises:
        PolicyError: the file is missing, is not what was announced, or does not fit the engine.
    """
    file = Path(policy.uri) / WEIGHTS
    name = f"policy version {policy.version} of epoch {policy.epoch} at {file}"
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise PolicyError(f"{name} cannot be read ({error.strerror}): is the run's folder shared?") from None
    if digest != policy.digest:
        raise PolicyError(f"{name} has digest {digest[:12]}…, announced was {policy.digest[:12]}…: it is not served")
    try:
        found = read_header(file)
    except ValueError as error:
        raise PolicyError(f"{name}: {error}") from None
    for shapes in (found, expected := dict(expected)):
        shapes.pop(_TIED_HEAD, None)
    if found != expected:
        odd = sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))
        raise PolicyError(f"{name} does not fit the model that is served: {odd[0]} and {len(odd) - 1} more differ")
    return file
