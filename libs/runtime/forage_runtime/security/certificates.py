"""Makes an authority and certificates for the services of one machine or a test; a cluster has cert-manager.

Keys are on the curve P-256. Files are replaced as a whole, and those of keys are readable by their owner alone.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 365
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class Authority:
    """The files of an authority: its certificate, which is `tls.ca` of every service, and its private key."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class IssuedCertificate:
    """The files of a certificate (`tls.cert`) and its private key (`tls.key`)."""

    cert: Path
    key: Path


def make_authority(folder: Path, name: str = "Forage", valid_days: int = VALID_DAYS) -> Authority:
    """Make an authority: `ca.pem` and `ca.key` in a folder, which is made where it is missing.

    Raises:
        OSError: a file cannot be written.
    """
    files = Authority(folder / "ca.pem", folder / "ca.key")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _make_name(f"{name} authority")
    not_before, not_after = _make_period(valid_days)
    certificate = (
        _start_certificate(subject, subject, key.public_key(), not_before, not_after)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_pair(files.cert, files.key, certificate, key)
    return files


def issue_certificate(
    authority: Authority,
    folder: Path,
    name: str,
    hosts: Iterable[str] = LOCAL_HOSTS,
    *,
    valid_days: int = VALID_DAYS,
    not_before: datetime | None = None,
    not_after: datetime | None = None,
    server: bool = True,
    client: bool = True,
) -> IssuedCertificate:
    """Issue a certificate: `<name>.pem` and `<name>.key` in a folder; those that are there are replaced.

    Args:
        name: common name, by which logs of other services call the holder.
        hosts: DNS names and IP addresses under which callers reach it.
        valid_days: days from now, unless `not_after` is given.
        server, client: what it may be used for: a service calls other services too.

    Raises:
        OSError: a file cannot be read or written.
    """
    files = IssuedCertificate(folder / f"{name}.pem", folder / f"{name}.key")
    issuer = x509.load_pem_x509_certificate(authority.cert.read_bytes())
    issuer_key = serialization.load_pem_private_key(authority.key.read_bytes(), password=None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    start, end = _make_period(valid_days)
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [
        use
        for use, wanted in ((ExtendedKeyUsageOID.SERVER_AUTH, server), (ExtendedKeyUsageOID.CLIENT_AUTH, client))
        if wanted
    ]
    builder = (
        _start_certificate(issuer.subject, _make_name(name), key.public_key(), not_before or start, not_after or end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_make_authority_identifier(issuer), critical=False)
    )
    if alternatives := [_make_host(host) for host in dict.fromkeys(hosts)]:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    _write_pair(files.cert, files.key, builder.sign(issuer_key, hashes.SHA256()), key)
    return files


def _start_certificate(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey, not_before: datetime, not_after: datetime
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        issuer, subject, key, x509.random_serial_number(), not_valid_before=not_before, not_valid_after=not_after
    )


def _make_period(valid_days: int) -> tuple[datetime, datetime]:
    now = datetime.now(UTC)
    return now - _CLOCK_SKEW, now + timedelta(days=valid_days)


def _make_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _make_host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _make_authority_identifier(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """The identifier that the issuer states for its key: others than `make_authority` compute it in their own way."""
    try:
        stated = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound:
        key = issuer.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(stated.value)


def _make_key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_pair(cert: Path, key: Path, certificate: x509.Certificate, private: ec.EllipticCurvePrivateKey) -> None:
    """Write the key first: who reads the pair between the two sees that they do not fit, and keeps what it has."""
    cert.parent.mkdir(parents=True, exist_ok=True)
    pem = serialization.Encoding.PEM
    _replace(key, private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()), 0o600)
    _replace(cert, certificate.public_bytes(pem), 0o644)


def _replace(file: Path, contents: bytes, mode: int) -> None:
    partial = file.with_name(f".partial-{secrets.token_hex(4)}-{file.name}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(contents)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
