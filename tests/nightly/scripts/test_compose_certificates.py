"""`scripts/compose_certificates.py`: certificates of the services of one machine, made once and renewed in time."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from pathlib import Path

import compose_certificates
import pytest
from cryptography import x509
from waiting import WAIT_S

NOW = datetime.datetime.now(datetime.UTC)


def read(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_each_name_gets_a_certificate_that_others_verify(tmp_path: Path) -> None:
    assert compose_certificates.make_certificates(tmp_path, ["reward", "rollout"], NOW) == [
        "authority",
        "reward",
        "rollout",
    ]
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "reward/ca.pem")
    served.load_cert_chain(tmp_path / "reward/reward.pem", tmp_path / "reward/reward.key")
    served.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cafile=tmp_path / "rollout/ca.pem")
    client.load_cert_chain(tmp_path / "rollout/rollout.pem", tmp_path / "rollout/rollout.key")
    near, far = socket.socketpair()
    answers: list[bytes] = []

    def serve() -> None:
        with served.wrap_socket(far, server_side=True) as stream:
            answers.append(stream.recv(5))

    server = threading.Thread(target=serve)
    server.start()
    with client.wrap_socket(near, server_hostname="reward") as stream:
        stream.sendall(b"hello")
    server.join(WAIT_S)
    assert answers == [b"hello"]
    names = read(tmp_path / "reward/reward.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"reward", "localhost"} == set(names.get_values_for_type(x509.DNSName))


def test_keys_are_the_owners_alone(tmp_path: Path) -> None:
    compose_certificates.make_certificates(tmp_path, ["reward"], NOW)
    for file in ("authority/ca.key", "reward/reward.key"):
        assert (tmp_path / file).stat().st_mode & 0o077 == 0
    assert (tmp_path / "authority").stat().st_mode & 0o077 == 0
    assert sorted(file.name for file in (tmp_path / "authority").iterdir()) == ["ca.key", "ca.pem"]


def test_what_lasts_is_kept_and_what_ends_within_a_month_is_renewed(tmp_path: Path) -> None:
    compose_certificates.make_certificates(tmp_path, ["reward"], NOW)
    before = read(tmp_path / "reward/reward.pem")
    assert compose_certificates.make_certificates(tmp_path, ["reward"], NOW + datetime.timedelta(days=330)) == []
    assert compose_certificates.make_certificates(tmp_path, ["reward"], NOW + datetime.timedelta(days=340)) == [
        "reward"
    ]
    assert read(tmp_path / "reward/reward.pem").serial_number != before.serial_number


def test_a_new_authority_signs_all_anew(tmp_path: Path) -> None:
    compose_certificates.make_certificates(tmp_path, ["reward", "rollout"], NOW)
    (tmp_path / "authority/ca.pem").unlink()
    assert compose_certificates.make_certificates(tmp_path, ["reward", "rollout"], NOW) == [
        "authority",
        "reward",
        "rollout",
    ]
    assert (tmp_path / "reward/ca.pem").read_bytes() == (tmp_path / "authority/ca.pem").read_bytes()


def test_a_file_that_is_no_certificate_is_named_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "authority").mkdir()
    (tmp_path / "authority/ca.pem").write_text("?")
    assert compose_certificates.main([str(tmp_path), "reward"]) == 2
    assert f"remove {tmp_path} to make all anew" in capsys.readouterr().err
    assert compose_certificates.main([str(tmp_path)]) == 2
    assert "usage: compose_certificates.py FOLDER NAME" in capsys.readouterr().err
