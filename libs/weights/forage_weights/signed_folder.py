"""Signatures of folders of published policies: every file that lies in one, by its digest.

An announcement lists the weights alone, which is all that an engine reads of a folder. Whoever serves a folder by
itself, as `forage eval` does, reads configuration, tokenizer and chat template, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.errors import DataError
from forage_runtime.security.signatures import Purpose, RunSignatures, SignatureError
from forage_runtime.settings import SecuritySettings
from forage_weights.announcement import READERS, PolicyError, verify_files
from forage_weights.digests import compute_digest, is_digest, verify_digest
from forage_weights.folders import SIGNED, describe_folder, name_folder, parse_name, strip_whole
from forage_weights.parallel import map_parallel


def sign_folder(folder: Path, policy: Policy, signatures: RunSignatures) -> None:
    """Describe every file of a complete folder in `signed.json`; nothing happens without a key.

    Args:
        policy: as it will be announced: the digests of what it lists are not computed again.
    """
    if not signatures.signs:
        return
    listed = policy.parts[-1].files if policy.parts else policy.files
    known = {file.name: file.digest for file in listed}
    names = sorted(file.name for file in folder.iterdir())
    content = {
        "version": policy.version,
        "epoch": policy.epoch,
        "files": {name: known.get(name) or compute_digest(folder / name) for name in names},
    }
    signed = {"run": signatures.run, **content, "signature": signatures.sign(Purpose.FOLDER, content)}
    (folder / SIGNED).write_text(json.dumps(signed, indent=1) + "\n", encoding="utf-8")


def verify_published(folder: Path, whole: Path, security: SecuritySettings) -> str:
    """Return the id of the key that has signed a policy in a run's folder; empty: nobody has, or nobody can tell.

    Policies elsewhere are the user's own, who has named them: nobody signs these.

    Args:
        folder: `<run>/policies/v<version>-e<epoch>`.
        whole: what `open_whole` has returned for it.

    Raises:
        DataError: it must not be loaded: a file is altered, missing or added, or it is not signed as it must be.
        SettingsError: a key file is wrong.
    """
    # By the name that was given first: a link in a run does not make a run's policy one of the user's own.
    named = (Path(os.path.abspath(folder)), folder.resolve())
    found = next((strip_whole(one) for one in named if _is_published(strip_whole(one))), None)
    if security.verify_key_file is None or found is None:
        return ""
    folder = found
    signatures = RunSignatures.verifying(security, folder.parents[1].resolve().name)
    try:
        key = _verify_folder(folder, signatures)
        policy = describe_folder(folder)
        if policy is None and whole.resolve() != folder.resolve():
            raise SignatureError(f"it is no delta, and {whole} is not what it holds")
        if policy is not None and key:
            base = folder.with_name(name_folder(policy.parts[0].uri))
            _verify_folder(base, signatures)
            _verify_whole(policy, whole, base)
    except (SignatureError, PolicyError, OSError) as error:
        raise DataError(f"{folder} is refused: {error}") from None
    return key


def _is_published(folder: Path) -> bool:
    return folder.parent.name == "policies" and parse_name(folder.name) is not None


def _verify_folder(folder: Path, signatures: RunSignatures) -> str:
    content, signature = _read_signed(folder)
    key = signatures.require(Purpose.FOLDER, content, signature, str(folder))
    if not key:
        return ""
    if folder.name != f"v{content['version']}-e{content['epoch']}":
        raise SignatureError(
            f"it is signed as version {content['version']} of epoch {content['epoch']}, and its name is {folder.name}"
        )
    _compare(folder, content["files"], {SIGNED})
    return key


def _verify_whole(policy: Policy, whole: Path, base: Path) -> None:
    """Compare what was made of a delta: its weights with the description, other files with those of its base."""
    weights = {path.name for path in verify_files(policy, whole)}
    others = _read_signed(base)[0]["files"]
    _compare(whole, {name: digest for name, digest in others.items() if name not in weights}, weights)


def _compare(folder: Path, digests: Mapping[str, str], beside: set[str]) -> None:
    """Return if a folder has these files, those beside them that were verified elsewhere, and nothing else."""
    there = {path.name for path in folder.iterdir()}
    if added := sorted(there - digests.keys() - beside):
        raise SignatureError(f"{folder / added[0]} was added since it was signed")
    if missing := sorted(digests.keys() - there):
        raise SignatureError(f"{folder / missing[0]} is missing")
    wanted = list(digests)
    right = map_parallel(lambda name: verify_digest(folder / name, digests[name]), wanted, READERS)
    if altered := [name for name, is_right in zip(wanted, right, strict=True) if not is_right]:
        raise SignatureError(f"{folder / altered[0]} was changed since it was signed")


def _read_signed(folder: Path) -> tuple[dict[str, Any], str]:
    """What is signed, and the signature; empty where the file is missing.

    Raises:
        SignatureError: the file is damaged.
    """
    try:
        signed = json.loads((folder / SIGNED).read_bytes())
        files: dict[str, str] = signed["files"]
        content = {"version": signed["version"], "epoch": signed["epoch"], "files": files}
        plain = all(is_digest(digest) and name == Path(name).name for name, digest in files.items())
        if not plain or not all(type(content[name]) is int for name in ("version", "epoch")):
            raise ValueError("not what the trainer writes")
        return content, str(signed["signature"])
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SignatureError(f"{folder / SIGNED} is damaged ({error})") from None
