"""Published policies: which of two is newer, and whether their files may be loaded. No engine is imported here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from forage_common.errors import ForageError
from forage_common.files.model_folder import WEIGHTS, read_safetensors_header
from forage_common.v1.trajectory_pb2 import Policy

Shapes = Mapping[str, tuple[int, ...]]
SUFFIX = Path(WEIGHTS).suffix
_TIED_HEAD = "lm_head.weight"


class PolicyError(ForageError):
    """A published policy cannot be served: missing, altered, older, or of another shape."""


class NotServingError(ForageError):
    """This engine does not generate until it has loaded a policy or was started again."""


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


def describe_policy(policy: Policy) -> str:
    """The policy as error messages name it."""
    return f"policy version {policy.version} of epoch {policy.epoch} at {policy.uri or 'no address'}"


def list_files(policy: Policy) -> dict[str, str]:
    """File name → sha256 of every file of a published policy.

    Raises:
        PolicyError: a name could lead outside the policy's folder, or a digest is malformed.
    """
    files = {file.name: file.digest for file in policy.files} or {WEIGHTS: policy.digest}
    for name, digest in files.items():
        if not name or name in (".", "..") or set(name) & set("/\\\0"):
            raise PolicyError(
                f"{describe_policy(policy)} lists the file {name!r}: expected a plain name within its folder"
            )
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise PolicyError(f"{describe_policy(policy)} gives {name} the digest {digest!r}: expected 64 hex digits")
    return files


def verify_files(policy: Policy, folder: Path) -> list[Path]:
    """Check sizes and digests of the policy's files in a local folder; returns them in the order announced.

    Raises:
        PolicyError: a file is missing or differs from the announcement.
    """
    sizes = {file.name: file.bytes for file in policy.files}
    files = []
    for name, expected in list_files(policy).items():
        file = folder / name
        try:
            size = file.stat().st_size
            if sizes.get(name, size) != size:
                raise PolicyError(f"{describe_policy(policy)}: {file} has {size} bytes, announced were {sizes[name]}")
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise PolicyError(
                f"{describe_policy(policy)}: {file} cannot be read ({error.strerror}): is the run's folder shared?"
            ) from None
        if digest != expected:
            raise PolicyError(
                f"{describe_policy(policy)}: {file} has digest {digest[:12]}…, announced was {expected[:12]}…: "
                "it is not served"
            )
        files.append(file)
    return files


def read_tensor_shapes(policy: Policy, files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape over safetensors files, each tensor in one of them.

    Raises:
        PolicyError: a header is damaged, or two files hold the same tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            header = read_safetensors_header(file)
        except ValueError as error:
            raise PolicyError(f"{describe_policy(policy)}: {file}: {error}") from None
        if twice := sorted(header.keys() & shapes.keys()):
            raise PolicyError(f"{describe_policy(policy)}: {file} holds {twice[0]} a second time")
        shapes |= header
    return shapes


def verify_shapes(policy: Policy, found: Shapes, expected: Shapes) -> None:
    """Return if the tensors are those of the served model.

    The output head is ignored: where it is tied to the embedding, some files hold it and some do not.

    Raises:
        PolicyError: tensors are missing, unexpected, or of another shape.
    """
    different = sorted(
        name for name in (found.keys() | expected.keys()) - {_TIED_HEAD} if found.get(name) != expected.get(name)
    )
    if different:
        raise PolicyError(
            f"{describe_policy(policy)} does not fit the model that is served: {different[0]} and "
            f"{len(different) - 1} more differ"
        )
