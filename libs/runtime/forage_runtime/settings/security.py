"""Settings of what protects a deployment: certificates, signatures, and what is refused without them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from forage_runtime.settings.base import Section

Profile = Literal["default", "hardened"]
Sandbox = Literal["auto", "require", "off"]


class UserCode(Section):
    """What code of your own may do besides its work: nothing, unless it is opened here."""

    network: bool = Field(
        False, description="Your code may reach any address that its machine reaches, by TCP and UDP; false: none"
    )
    read: tuple[Path, ...] = Field(
        (), description="Files and folders that your code may read, besides its own file and Python's"
    )
    write: tuple[Path, ...] = Field(
        (), description="Files and folders that exist, which your code may read and change, besides a temporary folder"
    )
    programs: bool = Field(
        False, description="Your code may start processes and programs; they have the same files, network and limits"
    )


class TlsSettings(Section):
    """Certificates of every wire: gRPC, HTTP, health and metrics. Files that change are read again."""

    cert: Path | None = Field(
        None, description="PEM file of this service's certificate and those between it and the authority"
    )
    key: Path | None = Field(None, description="PEM file of the private key of cert")
    ca: Path | None = Field(
        None,
        description="PEM file of the authorities that sign the services' certificates; set: every wire speaks TLS",
    )
    require_client_cert: bool = Field(
        False, description="Refuse callers without a certificate of these authorities; health checks need none"
    )

    @property
    def is_on(self) -> bool:
        """Whether every wire speaks TLS."""
        return self.ca is not None

    @model_validator(mode="after")
    def _check_files(self) -> TlsSettings:
        if (self.cert is None) != (self.key is None):
            given, missing = ("cert", "key") if self.key is None else ("key", "cert")
            raise ValueError(f"{given} is given without {missing}: a service needs both files")
        if self.cert is not None and self.ca is None:
            raise ValueError("cert is given without ca: give the authority by which services verify each other")
        if self.require_client_cert and self.cert is None:
            raise ValueError("require_client_cert needs cert, key and ca: without them no wire speaks TLS")
        return self


class SecuritySettings(Section):
    """What is signed, fetched, run and recorded."""

    profile: Profile = Field(
        "default",
        description="hardened: refuse to start without TLS, tokens, a Redis user, signatures and a sandbox;"
        " `forage demo` and `forage up` make the certificates, tokens and keys of their run",
    )
    require_signed: bool = Field(
        False, description="Load only policies and checkpoints that the key of verify_key_file has signed"
    )
    signing_key_file: Path | None = Field(
        None, description="PEM file of the Ed25519 private key with which the trainer signs policies and checkpoints"
    )
    verify_key_file: Path | None = Field(
        None,
        description="PEM file of the Ed25519 public keys whose signatures are valid; several while one is replaced",
    )
    allowed_addresses: tuple[str, ...] = Field(
        (),
        description="Folders and URLs (s3://bucket/runs) below which policies may be read, too, besides the run's"
        " folder, trainer.publish.uri and model.path",
    )
    user_code: Sandbox = Field(
        "auto",
        description="How rewards and environments of your own run: auto: as isolated as the platform allows; require:"
        " refuse to start without network and file isolation; off: as ordinary processes",
    )
    audit_file: Path | None = Field(
        None, description="File that gets a JSON line for each act that changes what is served; unset: logs only"
    )

    @model_validator(mode="after")
    def _check_keys(self) -> SecuritySettings:
        if self.require_signed and self.verify_key_file is None:
            raise ValueError("require_signed needs verify_key_file: the public key of the run")
        return self
