"""`security.profile=hardened` on one machine: what is made, what stays, and which services of it a command meets."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from forage_cli.local.hardening import AUDIT, SECRETS, harden
from forage_runtime.errors import SettingsError
from forage_runtime.security.certificates import Authority, issue_certificate
from forage_runtime.security.profile import list_missing
from forage_runtime.security.tls import make_client_context, make_grpc_server_credentials, make_server_context
from forage_runtime.security.token_file import read_token
from forage_runtime.settings import Settings, load_settings

SERVICES = ("reward", "retriever", "rollout", "trainer", "console")


def load(folder: Path, *overrides: str) -> Settings:
    hardened = ["security.profile=hardened", f"run.dir={folder}", "run.id=run", "redis.username=someone"]
    return load_settings(None, [*hardened, *overrides], {})


def test_the_default_profile_makes_nothing(tmp_path: Path) -> None:
    settings = load(tmp_path, "security.profile=default")
    assert harden(settings) is settings
    assert list(tmp_path.iterdir()) == []


def test_every_service_has_what_the_profile_asks_for(tmp_path: Path) -> None:
    settings = harden(load(tmp_path))
    assert [lack for service in SERVICES for lack in list_missing(settings, service)] == []
    assert settings.security.require_signed
    assert settings.security.user_code == "require"
    assert settings.security.audit_file == tmp_path / "run" / AUDIT
    assert make_server_context(settings.tls) is not None
    assert make_grpc_server_credentials(settings.tls, "reward") is not None
    make_client_context(settings.tls)  # raises where a file is wrong


def test_only_the_owner_reads_what_is_made_and_nothing_of_it_is_in_the_settings(tmp_path: Path) -> None:
    settings = harden(load(tmp_path))
    folder = tmp_path / "run" / SECRETS
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    private = [file for file in folder.iterdir() if "PRIVATE" in file.read_text() or file.suffix == ".token"]
    assert len(private) == 7, "the keys of the authority, the certificate and the signatures, and four tokens"
    assert {stat.S_IMODE(file.stat().st_mode) for file in private} == {0o600}
    for file in private:
        assert file.read_text().strip() not in settings.to_yaml()


def test_tokens_differ_between_services_and_runs(tmp_path: Path) -> None:
    tokens = [
        read_token(file)
        for run in ("one", "two")
        for section in ("retriever", "reward", "rollout", "console")
        if (file := getattr(harden(load(tmp_path, f"run.id={run}")), section).auth_token_file)
    ]
    assert len(set(tokens)) == 8


def test_a_resumed_run_finds_what_was_made(tmp_path: Path) -> None:
    first = harden(load(tmp_path))
    files = {file: file.read_bytes() for file in (tmp_path / "run" / SECRETS).iterdir()}
    saved = tmp_path / "settings.yaml"
    saved.write_text(first.to_yaml())
    assert harden(load_settings(saved, [], {})) == first
    assert harden(load(tmp_path)) == first
    assert {file: file.read_bytes() for file in (tmp_path / "run" / SECRETS).iterdir()} == files


def test_a_certificate_that_ends_soon_is_renewed(tmp_path: Path) -> None:
    settings = harden(load(tmp_path))
    folder = tmp_path / "run" / SECRETS
    soon = datetime.now(UTC) + timedelta(days=2)
    issue_certificate(Authority(folder / "ca.pem", folder / "ca.key"), folder, "forage", not_after=soon)
    assert settings.tls.cert is not None
    old = settings.tls.cert.read_bytes()
    assert harden(settings).tls == settings.tls
    assert settings.tls.cert.read_bytes() != old


@pytest.mark.parametrize("made", ["link", "open", "file"])
def test_no_secrets_are_taken_from_a_folder_that_others_prepared(tmp_path: Path, made: str) -> None:
    folder, elsewhere = tmp_path / "run" / SECRETS, tmp_path / "elsewhere"
    folder.parent.mkdir()
    elsewhere.mkdir(mode=0o700)
    if made == "link":
        folder.symlink_to(elsewhere)
    elif made == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.write_text("")
    with pytest.raises(SettingsError, match="others have made it or can write to it"):
        harden(load(tmp_path))
    assert list(elsewhere.iterdir()) == []
