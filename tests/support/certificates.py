"""Certificates of a test: an authority, and certificates of services with the defects that tests ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from forage_runtime.security.certificates import Authority, IssuedCertificate, issue_certificate, make_authority

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Issuer:
    """An authority in a folder of its own, and what it issues: files `<name>.pem` and `<name>.key` beside `ca.pem`.

    Example:
        issuer = Issuer(tmp_path)
        settings = {"tls": issuer.make_settings(issuer.issue("reward"))}
    """

    folder: Path
    files: Authority = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", make_authority(self.folder))

    @property
    def ca(self) -> Path:
        return self.files.cert

    def issue(self, name: str, **options: Any) -> IssuedCertificate:
        """Issue a certificate for localhost and 127.0.0.1; a second one of a name replaces the first."""
        return issue_certificate(self.files, self.folder, name, **options)

    def issue_expired(self, name: str) -> IssuedCertificate:
        now = datetime.now(UTC)
        return self.issue(name, not_before=now - 2 * DAY, not_after=now - DAY)

    def issue_early(self, name: str) -> IssuedCertificate:
        """One that is not valid yet."""
        now = datetime.now(UTC)
        return self.issue(name, not_before=now + DAY, not_after=now + 2 * DAY)

    def make_settings(self, issued: IssuedCertificate | None, *, require_client_cert: bool = False) -> dict[str, Any]:
        """Section `tls` of a service that shows a certificate, or of a caller that has none."""
        own = {} if issued is None else {"cert": str(issued.cert), "key": str(issued.key)}
        return {"ca": str(self.ca), **own, "require_client_cert": require_client_cert}
