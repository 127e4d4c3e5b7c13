"""What an announcement says about a policy's files, and whether an engine may read them: from where, signed by whom.

Nothing of it is trusted before it was checked here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile
from forage_runtime.addresses import split_address
from forage_runtime.errors import ForageError
from forage_runtime.files.model_folder import WEIGHTS
from forage_runtime.security.signatures import Purpose, RunSignatures, SignatureError
from forage_runtime.settings import Settings
from forage_weights.allowed_addresses import AddressError, AllowedAddresses
from forage_weights.digests import compute_content, is_digest, verify_digest
from forage_weights.parallel import map_parallel

_LONGEST = 500
CANARY_ROWS, CANARY_TOKENS = 4, 64
"""A canary has at most so many rows of at most so many tokens: they are scored while nothing is sampled."""
READERS = 8
"""Files of a policy that are read or hashed at once: one file does not use all of a network's or a disk's bandwidth."""
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}", re.ASCII)


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
class PolicyFolder:
    """A checked folder of a policy.

    Attributes:
        files: those in the folder, by name.
        content: `compute_content` of the whole policy once this part is applied.
    """

    uri: str
    files: Mapping[str, PolicyFile]
    content: str


def list_parts(policy: Policy) -> list[PolicyFolder]:
    """List the folders that make a policy: a whole one, then the deltas that follow it.

    Raises:
        PolicyError: as `list_files`, or the parts do not make this policy.
    """
    files = list_files(policy)
    content = compute_content({name: file.digest for name, file in files.items()})
    if not policy.parts:
        return [PolicyFolder(policy.uri, files, content)]
    parts = [PolicyFolder(part.uri, check_files(policy, part.files), part.content) for part in policy.parts]
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


class Admission:
    """Checks the announcements of one run, which come from Redis and from `UpdateWeights`.

    Raises:
        SettingsError: a key file is wrong.
    """

    def __init__(self, settings: Settings) -> None:
        run, uri = settings.run, settings.trainer.publish.uri
        published = [f"{uri.rstrip('/')}/{run.id}"] if uri else []
        self._addresses = AllowedAddresses(
            [run.folder, *published, settings.model.path, *settings.security.allowed_addresses]
        )
        self._sender = split_address(settings.trainer.publish.direct_address or ":0")[0]
        self._signatures = RunSignatures.verifying(settings.security, run.id)
        self._newest = 0, 0
        """(epoch, version) of the newest signed policy that was admitted."""

    def check(self, policy: Policy) -> None:
        """Return if a policy may be read.

        Where signatures are required, none older than one that was admitted is: what Redis says may be an announcement
        of before. The trainer never goes back: after a rollback its version is lower, and its epoch higher.

        Raises:
            PolicyError: it may not; the sentence says what is wrong, and what allows it.
        """
        name = describe_policy(policy)
        try:
            self._check_addresses(policy)
            key = self._signatures.require(Purpose.ANNOUNCEMENT, describe_announcement(policy), policy.signature, name)
        except (AddressError, SignatureError) as error:
            raise PolicyError(f"{name} is refused: {error}") from None
        if not (key and self._signatures.is_required):
            return
        order = policy.epoch, policy.version
        if order < self._newest:
            raise PolicyError(
                f"{name} is refused: it is older than version {self._newest[1]} of epoch {self._newest[0]}, which was "
                "announced before: where the run was begun anew, start the engines again"
            )
        self._newest = order

    def _check_addresses(self, policy: Policy) -> None:
        if policy.parts:
            self._addresses.require(policy.uri)
            for part in policy.parts:
                self._addresses.require(part.uri, check_files(policy, part.files))
        else:
            self._addresses.require(policy.uri, list_files(policy))
        if policy.HasField("direct"):
            sender = policy.direct
            if not (_HOST.fullmatch(sender.host) and 0 < sender.port < 2**16):
                raise AddressError(f"the sender {sender.host[:200]!r}, port {sender.port}, is no address")
            if self._sender not in ("", sender.host):
                raise AddressError(f"the sender {sender.host} is not allowed: it is not trainer.publish.direct_address")


def describe_announcement(policy: Policy) -> dict[str, Any]:
    """Everything that an announcement says but its signature, as plain JSON data."""
    described: dict[str, Any] = json_format.MessageToDict(policy, preserving_proto_field_name=True)
    described.pop("signature", None)
    return described


def sign_announcement(policy: Policy, signatures: RunSignatures) -> None:
    """Sign a policy that is complete and about to be announced; nothing happens without a key."""
    policy.signature = signatures.sign(Purpose.ANNOUNCEMENT, describe_announcement(policy))
