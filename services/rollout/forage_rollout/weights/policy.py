"""Published policies: what may be loaded, and which of two is newer. No engine here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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
    """This engine answers nobody until it has loaded a policy or was started again."""


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


def described(policy: Policy) -> str:
    """The policy in an error's sentence."""
    return f"policy version {policy.version} of epoch {policy.epoch} at {policy.uri or 'no address'}"


def announced_files(policy: Policy) -> dict[str, str]:
    """File name → sha256 of everything that a published policy consists of.

    Raises:
        PolicyError: a name that is not one of a file in the policy's folder, or a digest that is none.
    """
    files = {file.name: file.digest for file in policy.files} or {WEIGHTS: policy.digest}
    for name, digest in files.items():
        if not name or name in (".", "..") or set(name) & set("/\\\0"):
            raise PolicyError(f"{described(policy)} lists the file {name!r}: expected a plain name within its folder")
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise PolicyError(f"{described(policy)} gives {name} the digest {digest!r}: expected 64 hex digits")
    return files


def verify_files(policy: Policy, folder: Path) -> list[Path]:
    """The policy's files in a local folder, after their sizes and digests were checked, in the order announced.

    Raises:
        PolicyError: a file is missing or is not what was announced.
    """
    sizes = {file.name: file.bytes for file in policy.files}
    files = []
    for name, expected in announced_files(policy).items():
        file = folder / name
        try:
            found = file.stat().st_size
            if sizes.get(name, found) != found:
                raise PolicyError(f"{described(policy)}: {file} has {found} bytes, announced were {sizes[name]}")
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise PolicyError(
                f"{described(policy)}: {file} cannot be read ({error.strerror}): is the run's folder shared?"
            ) from None
        if digest != expected:
            raise PolicyError(
                f"{described(policy)}: {file} has digest {digest[:12]}…, announced was {expected[:12]}…: "
                "it is not served"
            )
        files.append(file)
    return files


def tensor_shapes(policy: Policy, files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape over safetensors files, of which no two may hold the same tensor.

    Raises:
        PolicyError: a header is broken, or two files hold one tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            header = read_safetensors_header(file)
        except ValueError as error:
            raise PolicyError(f"{described(policy)}: {file}: {error}") from None
        if twice := sorted(header.keys() & shapes.keys()):
            raise PolicyError(f"{described(policy)}: {file} holds {twice[0]} a second time")
        shapes |= header
    return shapes


def verify_shapes(policy: Policy, found: Shapes, expected: Shapes) -> None:
    """Raise unless these tensors are those of the model that is served; a tied head may be among them or not.

    Raises:
        PolicyError: tensors are missing, too many, or of another shape.
    """
    one, other = dict(found), dict(expected)
    for shapes in (one, other):
        shapes.pop(_TIED_HEAD, None)
    if one != other:
        odd = sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
        raise PolicyError(
            f"{described(policy)} does not fit the model that is served: {odd[0]} and {len(odd) - 1} more differ"
        )
