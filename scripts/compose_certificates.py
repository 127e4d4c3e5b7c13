"""Makes an authority and a certificate for each service of one machine, in folders that are mounted into containers.

    compose_certificates.py FOLDER NAME…

FOLDER/authority has the authority, FOLDER/NAME the certificate for the DNS name NAME: NAME.pem, NAME.key and ca.pem.
What is there is kept until a month before it ends; then it is made again, and services read it without a restart.
"""

from __future__ import annotations

import datetime
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509

from forage_runtime.security.certificates import LOCAL_HOSTS, Authority, issue_certificate, make_authority

RENEWED_BEFORE = datetime.timedelta(days=30)
AUTHORITY_DAYS = 3650


def is_lasting(cert: Path, now: datetime.datetime) -> bool:
    """Whether a certificate is there and valid for longer than a month."""
    if not cert.exists():
        return False
    return x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc - now > RENEWED_BEFORE


def make_certificates(folder: Path, names: Sequence[str], now: datetime.datetime) -> list[str]:
    """Make what is missing or ends soon, and list what was made.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a file that is there is no certificate.
    """
    made = []
    authority = Authority(folder / "authority/ca.pem", folder / "authority/ca.key")
    if not is_lasting(authority.cert, now):
        authority = make_authority(folder / "authority", valid_days=AUTHORITY_DAYS)
        authority.cert.parent.chmod(0o700)
        made.append("authority")
    trusted = authority.cert.read_bytes()
    for name in names:
        target = folder / name
        ca = target / "ca.pem"
        if is_lasting(target / f"{name}.pem", now) and ca.exists() and ca.read_bytes() == trusted:
            continue
        issued = issue_certificate(authority, folder / "authority", name, [name, *LOCAL_HOSTS])
        target.mkdir(parents=True, exist_ok=True)
        # The key first: a service that reads between the two keeps what it has.
        for source in (issued.key, issued.cert, authority.cert):
            partial = target / f".{source.name}"
            shutil.copyfile(source, partial)
            partial.chmod(0o600 if source == issued.key else 0o644)
            partial.replace(target / source.name)
        issued.key.unlink()
        issued.cert.unlink()
        made.append(name)
    return made


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        sys.stderr.write("usage: compose_certificates.py FOLDER NAME…\n")
        return 2
    try:
        made = make_certificates(Path(arguments[0]), arguments[1:], datetime.datetime.now(datetime.UTC))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"certificates: {error}: remove {arguments[0]} to make all anew\n")
        return 2
    sys.stdout.writelines(f"  made the certificate of {name}\n" for name in made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
