"""What an announcement says about a policy's files. Nothing of it is trusted before it was checked here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile
from forage_runtime.errors import ForageError
from forage_runtime.files.model_folder import WEIGHTS
from forage_weights.digests import compute_content, is_digest, verify_digest
from forage_weights.parallel import map_parallel

_LONGEST = 500
CANARY_ROWS, CANARY_TOKENS = 4, 64
"""A canary has at most so many rows of at most so many tokens: they are scored while nothing is sampled."""
READERS = 8
"""Files of a policy that are read or hashed at once: one file does not use all of a network's or a disk's bandwidth."""


class PolicyError(ForageError):
    """A published policy cannot be served: missing, altered, older, or of another shape."""


def describe_policy(policy: Policy) -> str:
    """Describe the policy as error messages name it."""
    uri = policy.uri if policy.uri.isprintable() and len(policy.uri) <= _LONGEST else ascii(policy.uri[:_LONGEST])
    return f"policy version {policy.version} of epoch {policy.epoch} at {uri or 'no address'}"


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
        name = file.name
        if not name or name.startswith(".") or set(name) & set("/\\") or not name.isprintable() or len(name) > _LONGEST:
            raise PolicyError(
                f"{describe_policy(policy)} lists the file {name[:_LONGEST]!r}: expected a plain name within its folder"
            )
        if not is_digest(file.digest):
            raise PolicyError(
                f"{describe_policy(policy)} gives {file.name} the digest {file.digest[:80]!r}: "
                "expected blake3: and 64 hex digits, or the 64 of SHA-256"
            )
        if file.name in found:
            raise PolicyError(f"{describe_policy(policy)} lists {file.name} twice")
        found[file.name] = file
    return found


def check_canary(policy: Policy, vocabulary: int) -> None:
    """Return if an engine can score the canary of a policy; one without is right, too.

    Args:
        vocabulary: number of token ids of the model.

    Raises:
        PolicyError: the sentence says what is wrong.
    """
    name, rows = f"{describe_policy(policy)} has a canary", policy.canary.rows
    if len(rows) > CANARY_ROWS:
        raise PolicyError(f"{name} of {len(rows)} rows, expected at most {CANARY_ROWS}")
    for number, row in enumerate(rows):
        tokens, given = len(row.token_ids), len(row.logprobs)
        if not 2 <= tokens <= CANARY_TOKENS or given != tokens - 1:
            expected = f"2 to {CANARY_TOKENS} tokens and a log-probability of each but the first"
            raise PolicyError(f"{name} whose row {number} has {tokens} tokens and {given} values, expected {expected}")
        if (highest := max(row.token_ids)) >= vocabulary:
            raise PolicyError(f"{name} whose row {number} has token {highest}, expected fewer than {vocabulary}")
        if not all(map(math.isfinite, row.logprobs)):
            raise PolicyError(f"{name} whose row {number} has a log-probability that is not finite")


@dataclass(frozen=True)
class Part:
    """A checked folder of a policy.

    Attributes:
        files: those in the folder, by name.
        content: `compute_content` of the whole policy once this part is applied.
    """

    uri: str
    files: Mapping[str, PolicyFile]
    content: str


def list_parts(policy: Policy) -> list[Part]:
    """List the folders that make a policy: a whole one, then the deltas that follow it.

    Raises:
        PolicyError: as `list_files`, or the parts do not make this policy.
    """
    files = list_files(policy)
    content = compute_content({name: file.digest for name, file in files.items()})
    if not policy.parts:
        return [Part(policy.uri, files, content)]
    parts = [Part(part.uri, check_files(policy, part.files), part.content) for part in policy.parts]
    first = compute_content({name: file.digest for name, file in parts[0].files.items()})
    if parts[0].content != first or parts[-1].content != content or parts[0].files.keys() != files.keys():
        raise PolicyError(f"{describe_policy(policy)}: its {len(parts)} parts do not make it")
    if wrong := [part.content for part in parts if not is_digest(part.content)]:
        raise PolicyError(f"{describe_policy(policy)} has a part with the content {wrong[0][:80]!r}: expected a digest")
    return parts


def verify_files(policy: Policy, folder: Path, files: Mapping[str, PolicyFile] | None = None) -> list[Path]:
    """Check sizes and digests of files in a local folder; returns them in the order announced.

    Args:
        files: those of the folder, as `check_files` returns them; by default those of the whole policy.

    Raises:
        PolicyError: a file is missing or differs from the announcement.
    """

    def verify(file: PolicyFile) -> Path:
        path = folder / file.name
        try:
            size = path.stat().st_size
            if file.bytes and size != file.bytes:
                raise PolicyError(f"{describe_policy(policy)}: {path} has {size} bytes, announced were {file.bytes}")
            if not verify_digest(path, file.digest):
                raise PolicyError(
                    f"{describe_policy(policy)}: {path} does not have the digest that was announced, "
                    f"{file.digest[:19]}…: it is not served"
                )
        except OSError as error:
            raise PolicyError(
                f"{describe_policy(policy)}: {path} cannot be read ({error.strerror}): is the run's folder shared?"
            ) from None
        return path

    return map_parallel(verify, (list_files(policy) if files is None else files).values(), READERS)
