"""`security.profile=hardened` on one machine: what is made, what stays, and which services of it a command meets."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from forage_cli.local.hardening import AUDIT, SECRETS, adopt_security, harden
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


@pytest.mark.parametrize("setting", ["rollout.auth_token_file", "console.auth_token_file", "security.audit_file"])
def test_what_the_settings_give_stays(tmp_path: Path, setting: str) -> None:
    given = tmp_path / "given"
    given.write_text("a-token\n")
    settings = harden(load(tmp_path, f"{setting}={given}"))
    section, name = setting.split(".")
    assert getattr(getattr(settings, section), name) == given


def test_certificates_of_ones_own_stay(tmp_path: Path) -> None:
    own = harden(load(tmp_path, "run.id=other")).tls
    files = [f"tls.{name}={getattr(own, name)}" for name in ("cert", "key", "ca")]
    settings = harden(load(tmp_path, *files, "tls.require_client_cert=true"))
    assert settings.tls == own
    assert not (tmp_path / "run" / SECRETS / "ca.pem").exists()


def test_a_command_takes_the_secrets_of_the_services_that_it_meets(tmp_path: Path) -> None:
    running = harden(load(tmp_path))
    asked = load_settings(None, [f"run.dir={tmp_path}", "run.id=ask"], {})
    adopted = adopt_security(asked, running, tmp_path / "run")
    assert (adopted.tls, adopted.security, adopted.redis) == (running.tls, running.security, running.redis)
    assert adopted.rollout.auth_token_file == running.rollout.auth_token_file
    assert adopted.run == asked.run


@pytest.mark.parametrize("running", [["rollout.grpc_address=127.0.0.1:1"], ["security.profile=default"]])
def test_a_command_takes_nothing_from_other_services(tmp_path: Path, running: list[str]) -> None:
    asked = load_settings(None, [f"run.dir={tmp_path}"], {})
    assert adopt_security(asked, harden(load(tmp_path, *running)), tmp_path / "run") is asked


def test_a_umask_that_hides_nothing_changes_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        test_only_the_owner_reads_what_is_made_and_nothing_of_it_is_in_the_settings(tmp_path)
    finally:
        os.umask(before)


@pytest.mark.parametrize("setting", ["rollout.auth_token_file", "redis.password_file"])
def test_a_run_of_others_sends_no_file_of_ones_own(tmp_path: Path, setting: str) -> None:
    outside = tmp_path / "private"
    outside.write_text("a-token-of-another-service\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(outside)
    asked = load_settings(None, [f"run.dir={tmp_path}"], {})
    for file in (outside, tmp_path / "run" / "link", tmp_path / "run" / ".." / "private"):
        with pytest.raises(SettingsError, match=f"{setting} of .* is no file of that run"):
            adopt_security(asked, load(tmp_path, f"{setting}={file}"), tmp_path / "run")


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
