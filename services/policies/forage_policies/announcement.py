"""What an announcement says about a policy's files. Nothing of it is trusted before it was checked here."""

from __future__ import annotations

from collections.abc import Iterable

from forage_common.errors import ForageError
from forage_common.files.model_folder import WEIGHTS
from forage_common.v1.trajectory_pb2 import Policy, PolicyFile
from forage_policies.digests import is_digest


class PolicyError(ForageError):
    """A published policy cannot be served: missing, altered, older, or of another shape."""


def describe_policy(policy: Policy) -> str:
    """Describe the policy as error messages name it."""
    return f"policy version {policy.version} of epoch {policy.epoch} at {policy.uri or 'no address'}"


def list_files(policy: Policy) -> dict[str, PolicyFile]:
    """List every file of the whole policy by its name. A file of 0 bytes has no announced size.

    Raises:
        PolicyError: a name could lead outside the policy's folder, or a digest is malformed.
    """
    return check_files(policy, policy.files or [PolicyFile(name=WEIGHTS, digest=policy.digest)])


def check_files(policy: Policy, files: Iterable[PolicyFile]) -> dict[str, PolicyFile]:
    """Check the files of a folder that the announcement of a policy lists; returns them by name.

    Raises:
        PolicyError: as `list_files`.
    """
    found: dict[str, PolicyFile] = {}
    for file in files:
        if not file.name or file.name.startswith(".") or set(file.name) & set("/\\\0"):
            raise PolicyError(
                f"{describe_policy(policy)} lists the file {file.name!r}: expected a plain name within its folder"
            )
        if not is_digest(file.digest):
            raise PolicyError(
                f"{describe_policy(policy)} gives {file.name} the digest {file.digest!r}: "
                "expected blake3: and 64 hex digits, or the 64 of SHA-256"
            )
        if file.name in found:
            raise PolicyError(f"{describe_policy(policy)} lists {file.name} twice")
        found[file.name] = file
    return found
