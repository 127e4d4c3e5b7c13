"""The profile `hardened` on one machine: certificates, tokens and keys of a run, made where the settings give none."""

from __future__ import annotations

import os
import secrets
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509

from forage_runtime.errors import SettingsError
from forage_runtime.security.certificates import LOCAL_HOSTS, issue_certificate, make_authority
from forage_runtime.security.signatures import SIGNING_KEY, VERIFY_KEY, write_key_pair
from forage_runtime.settings import Settings
from forage_runtime.settings.base import Section

SECRETS = "secrets"
"""Folder below that of a run with what only its owner may read."""

AUDIT = "audit.jsonl"
"""File in the folder of a run with the acts that changed what was served."""

CERTIFICATE = "forage.pem"
_WITH_TOKEN = ("retriever", "reward", "rollout", "console")
_RENEW_BEFORE = timedelta(days=30)


def harden(settings: Settings) -> Settings:
    """Complete the settings of a stack on this machine with what `security.profile=hardened` asks for.

    What the settings give stays. What is made lies in `<run>/secrets`, and a resumed run finds it there.

    Raises:
        SettingsError: somebody else could have put keys of theirs into that folder.
    """
    if settings.security.profile != "hardened":
        return settings
    folder = settings.run.folder.absolute() / SECRETS
    _make_own_folder(folder)
    security: dict[str, Any] = {"user_code": "require", "require_signed": True}
    if settings.security.signing_key_file is None and settings.security.verify_key_file is None:
        private, public = folder / SIGNING_KEY, folder / VERIFY_KEY
        if not private.is_file():
            write_key_pair(folder)
        security |= {"signing_key_file": private, "verify_key_file": public}
    if settings.security.audit_file is None:
        security["audit_file"] = settings.run.folder.absolute() / AUDIT
    changes: dict[str, Section] = {"security": settings.security.model_copy(update=security)}
    if not settings.tls.is_on or settings.tls.cert == folder / CERTIFICATE:
        changes["tls"] = settings.tls.model_copy(update=_make_certificate(folder))
    for service in _WITH_TOKEN:
        section: Section = getattr(settings, service)
        if getattr(section, "auth_token_file", None) is None:
            changes[service] = section.model_copy(update={"auth_token_file": _make_token(folder / f"{service}.token")})
    return settings.model_copy(update=changes)


def _make_own_folder(folder: Path) -> None:
    """Make a folder that its owner alone may enter.

    Raises:
        SettingsError: there is one that somebody else has made, or could write to.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if not is_own:
            raise SettingsError(
                f"{folder} is to hold keys, and others have made it or can write to it: remove it, or change run.id"
            ) from None
        folder.chmod(0o700)


def _make_certificate(folder: Path) -> dict[str, Any]:
    """Make the certificate that every service of the machine shows, unless there is one that lasts."""
    files = {"cert": folder / CERTIFICATE, "key": folder / "forage.key", "ca": folder / "ca.pem"}
    if not all(file.is_file() for file in files.values()) or _is_ending(files["cert"]):
        issue_certificate(make_authority(folder), folder, "forage", LOCAL_HOSTS)
    return {**files, "require_client_cert": True}


def _is_ending(cert: Path) -> bool:
    return x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc - datetime.now(UTC) < _RENEW_BEFORE


def _make_token(file: Path) -> Path:
    if not file.is_file():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
            stream.write(secrets.token_urlsafe(32) + "\n")
    return file
