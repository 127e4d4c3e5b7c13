"""Ed25519 signatures over canonical JSON, by keys in PEM files.

What is signed names its purpose and its run: a signature of one is none of another. Whoever verifies compares the rest
that it is bound to, such as epoch and version, with what is expected.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from forage_runtime.errors import ForageError, SettingsError
from forage_runtime.security.file_stamp import read_stamp
from forage_runtime.settings import SecuritySettings
from forage_runtime.telemetry.logs import get_logger

SIGNING_KEY, VERIFY_KEY = "signing-key.pem", "verify-key.pem"
"""Names of the files that `write_key_pair` makes."""
_MAGIC = b"forage signature 1\n"
_LARGEST_FILE = 2**16
_PUBLIC_KEY = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_SIGNATURE = re.compile(r"ed25519:([0-9a-f]{16}):([A-Za-z0-9+/]{86}==)")
_TOO_OPEN = stat.S_IRWXO | stat.S_IWGRP


class SignatureError(ForageError):
    """Something is not signed by a valid key, or not for this purpose and run, or has changed since."""


class Purpose(StrEnum):
    """What a signature is for."""

    ANNOUNCEMENT = "announced policy"
    FOLDER = "policy folder"
    CHECKPOINT = "checkpoint"


class Signer:
    """The private key of a run's trainer, read again when its file changes; the last good one stays meanwhile.

    Raises:
        SettingsError: the file is missing, open to others, or no Ed25519 key without a passphrase, at the start.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._key = _read_signing_key(file)
        self._stamp = read_stamp(file)

    @property
    def key_id(self) -> str:
        """Fingerprint of the public key."""
        return compute_key_id(self._refresh().public_key())

    def sign(self, purpose: Purpose, run: str, content: Mapping[str, Any]) -> str:
        """Sign plain JSON data; returns the signature as text."""
        key = self._refresh()
        signature = base64.b64encode(key.sign(_encode(purpose, run, content))).decode()
        return f"ed25519:{compute_key_id(key.public_key())}:{signature}"

    def _refresh(self) -> Ed25519PrivateKey:
        try:
            if (stamp := read_stamp(self._file)) != self._stamp:
                self._key, self._stamp = _read_signing_key(self._file), stamp
                get_logger().info("signing_key_reloaded", key=compute_key_id(self._key.public_key()))
        except (OSError, SettingsError) as error:
            get_logger().warning("signing_key_kept", detail=str(error))
        return self._key


class VerifyKeys:
    """The public keys of a file, which is read again when it changes; the last good ones stay valid meanwhile.

    Raises:
        SettingsError: the file is missing or holds anything but Ed25519 public keys, at the start.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._keys = self._read()
        self._stamp = read_stamp(file)

    @property
    def keys(self) -> Mapping[str, Ed25519PublicKey]:
        """The keys by their id."""
        try:
            if (stamp := read_stamp(self._file)) != self._stamp:
                self._keys, self._stamp = self._read(), stamp
                get_logger().info("verify_keys_reloaded", keys=sorted(self._keys))
        except (OSError, SettingsError) as error:
            get_logger().warning("verify_keys_kept", detail=str(error))
        return self._keys

    def verify(self, purpose: Purpose, run: str, content: Mapping[str, Any], signature: str, what: str) -> str:
        """Return the id of the key that has signed this.

        Args:
            what: how errors name it.

        Raises:
            SignatureError: none of the keys has.
        """
        match = _SIGNATURE.fullmatch(signature)
        value = base64.b64decode(match[2]) if match else b""
        if match is None or base64.b64encode(value).decode() != match[2]:  # several texts would stand for one value
            raise SignatureError(f"{what} has a damaged signature: expected ed25519:<key>:<base64>")
        key = self.keys.get(match[1])
        if key is None:
            raise SignatureError(
                f"{what} is signed by the key {match[1]}, which is not one of security.verify_key_file {self._file}"
            )
        try:
            key.verify(value, _encode(purpose, run, content))
        except InvalidSignature:
            raise SignatureError(
                f"{what} is not what the key {match[1]} has signed for run '{run}': it was changed since, or is of "
                "another run"
            ) from None
        return match[1]

    def _read(self) -> dict[str, Ed25519PublicKey]:
        content = _read(self._file, "security.verify_key_file")
        if b"PRIVATE KEY-----" in content:
            raise SettingsError(
                f"security.verify_key_file {self._file} holds a private key: give public ones alone, the file "
                f"{VERIFY_KEY} of 'forage security keys'"
            )
        keys: dict[str, Ed25519PublicKey] = {}
        for number, block in enumerate(_PUBLIC_KEY.findall(content), 1):
            try:
                key = load_pem_public_key(block)
            except (ValueError, UnsupportedAlgorithm):
                raise SettingsError(
                    f"security.verify_key_file {self._file}: key {number} is damaged: give PEM files of public keys"
                ) from None
            if not isinstance(key, Ed25519PublicKey):
                raise SettingsError(
                    f"security.verify_key_file {self._file}: key {number} is of another kind ({type(key).__name__}): "
                    "expected Ed25519, as 'forage security keys' makes it"
                )
            keys[compute_key_id(key)] = key
        if not keys:
            raise SettingsError(
                f"security.verify_key_file {self._file} holds no public key in PEM: give the file {VERIFY_KEY} of "
                "'forage security keys'"
            )
        return keys


class RunSignatures:
    """Signs and verifies what belongs to one run, as the section `security` of the settings says.

    A wrong signature is refused wherever there are keys to verify it; a missing one where signatures are required.

    Raises:
        SettingsError: a key file is wrong, or what the one signs the other would refuse.
    """

    @classmethod
    def verifying(cls, security: SecuritySettings, run: str) -> RunSignatures:
        """As the constructor, of who only verifies: the private key is not read, and need not be there."""
        return cls(security.model_copy(update={"signing_key_file": None}), run)

    def __init__(self, security: SecuritySettings, run: str) -> None:
        self.run = run
        self.is_required = security.require_signed
        self._signer = None if security.signing_key_file is None else Signer(security.signing_key_file)
        self._keys = None if security.verify_key_file is None else VerifyKeys(security.verify_key_file)
        if self._signer is not None and self._keys is not None and self._signer.key_id not in self._keys.keys:
            raise SettingsError(
                f"security.signing_key_file {security.signing_key_file} is the key {self._signer.key_id}, which is not "
                f"one of security.verify_key_file {security.verify_key_file}: add its public key there"
            )

    @property
    def signs(self) -> bool:
        """Whether there is a key to sign with."""
        return self._signer is not None

    @property
    def key_id(self) -> str:
        """The fingerprint of the key that signs; empty without one."""
        return "" if self._signer is None else self._signer.key_id

    def require_signer(self, who: str) -> None:
        """
        Raises:
            SettingsError: signatures are required, and there is no key to make them.
        """
        if self.is_required and not self.signs:
            raise SettingsError(
                f"security.require_signed is set, and {who} has no security.signing_key_file: nobody would load what "
                "it writes; give it the private key of verify_key_file"
            )

    def sign(self, purpose: Purpose, content: Mapping[str, Any]) -> str:
        """Sign plain JSON data; empty without a key."""
        return "" if self._signer is None else self._signer.sign(purpose, self.run, content)

    def require(self, purpose: Purpose, content: Mapping[str, Any], signature: str, what: str) -> str:
        """Return the id of the key that has signed this; empty: nobody has, or there is no key to tell.

        Raises:
            SignatureError: the signature is wrong, or missing and required.
        """
        if self._keys is None:
            return ""
        if signature:
            return self._keys.verify(purpose, self.run, content, signature, what)
        if self.is_required:
            raise SignatureError(f"{what} is not signed, and security.require_signed is set")
        return ""


def compute_key_id(key: Ed25519PublicKey) -> str:
    """Compute the fingerprint of a public key: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:16]


def write_key_pair(folder: Path) -> str:
    """Make a key pair: `signing-key.pem`, which its owner alone can read, and `verify-key.pem`; returns the key's id.

    Raises:
        SettingsError: there is a key already, or the folder cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, mode, content in ((SIGNING_KEY, 0o600, private), (VERIFY_KEY, 0o644, public)):
            with os.fdopen(os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
                stream.write(content)
    except FileExistsError as error:
        raise SettingsError(f"{error.filename} exists: name another folder, or remove the old key pair") from None
    except OSError as error:
        raise SettingsError(f"{folder} cannot be written ({error.strerror}): name another folder") from None
    return compute_key_id(key.public_key())


def _read_signing_key(file: Path) -> Ed25519PrivateKey:
    content = _read(file, "security.signing_key_file")
    if file.stat().st_mode & _TOO_OPEN:
        raise SettingsError(
            f"security.signing_key_file {file} is open to others than its owner and readers of its group: "
            f"chmod 600 {file}"
        )
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:
        raise SettingsError(
            f"security.signing_key_file {file} has a passphrase: give a key without one, from 'forage security keys', "
            "and protect the file"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError(
            f"security.signing_key_file {file} holds no private key in PEM: make one with 'forage security keys'"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(
            f"security.signing_key_file {file} holds a key of another kind ({type(key).__name__}): expected Ed25519, "
            "as 'forage security keys' makes it"
        )
    return key


def _encode(purpose: Purpose, run: str, content: Mapping[str, Any]) -> bytes:
    tree = {"purpose": purpose, "run": run, "content": content}
    return _MAGIC + json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _read(file: Path, setting: str) -> bytes:
    try:
        if not file.is_file():
            raise FileNotFoundError(2, "no such file")
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise SettingsError(
            f"{setting} {file} cannot be read ({error.strerror}): give a PEM file, as 'forage security keys' makes it"
        ) from None
    if len(content) > _LARGEST_FILE:
        raise SettingsError(f"{setting} {file} has more than {_LARGEST_FILE} bytes: expected a PEM file of keys")
    return content
