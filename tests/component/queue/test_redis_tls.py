"""TLS to a real server that speaks it: Debian's. The embedded one is built without TLS and stays on loopback."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from certificates import Issuer
from redis_process import DURABLE, serve

from forage_proto.v1.trajectory_pb2 import Prompt
from forage_queue.streams.client import StreamClient
from forage_queue.streams.users import Role, describe_all, hash_password
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings, load_settings


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "issued")


@pytest.fixture
def address(tmp_path: Path, issuer: Issuer, free_address: Callable[[], str]) -> Iterator[str]:
    """A server with users and functions that asks its clients for certificates, and speaks plain text at no port."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("needs a Redis with TLS: apt-get install redis-server as root")
    own, port, plain = issuer.issue("redis"), free_address().rpartition(":")[2], free_address().rpartition(":")[2]
    users = describe_all({role: [hash_password(role)] for role in Role})
    (tmp_path / "users.acl").write_text(users)
    tls = ("--tls-port", port, "--tls-cert-file", str(own.cert), "--tls-key-file", str(own.key))
    tls += ("--tls-ca-cert-file", str(issuer.ca), "--aclfile", str(tmp_path / "users.acl"))
    with serve(binary, tmp_path / "redis", plain, *DURABLE, *tls):
        yield f"rediss://127.0.0.1:{port}/0"


def load(address: str, tmp_path: Path, *overrides: str) -> RedisSettings:
    (tmp_path / "word").write_text("admin\n")
    login = ["redis.username=forage-admin", f"redis.password_file={tmp_path}/word"]
    return load_settings(None, [f"redis.url={address}", *login, *overrides], {}).redis


def test_the_files_of_all_wires_are_those_for_redis(address: str, tmp_path: Path, issuer: Issuer) -> None:
    one = issuer.issue("trainer")
    settings = load(address, tmp_path, f"tls.ca={issuer.ca}", f"tls.cert={one.cert}", f"tls.key={one.key}")
    client = StreamClient(settings, "run", patience_s=1)
    client.create_groups()
    client.acquire_epoch()
    assert client.issue(Prompt(group_uid="uid", batch=1))
    own = issuer.issue("another")
    files = [f"redis.ca_file={issuer.ca}", f"redis.cert_file={own.cert}", f"redis.key_file={own.key}"]
    assert [issue.group_uid for issue in StreamClient(load(address, tmp_path, *files), "run").read_issued()] == ["uid"]


def test_strangers_and_plain_text_are_refused(address: str, tmp_path: Path, issuer: Issuer) -> None:
    one, other = issuer.issue("trainer"), Issuer(tmp_path / "other")
    stranger, expired = other.issue("stranger"), issuer.issue_expired("late")
    trusted = f"tls.ca={issuer.ca}"
    for overrides, sentence in (
        ([trusted], "no answer"),  # without a certificate of its own
        ([trusted, f"tls.cert={stranger.cert}", f"tls.key={stranger.key}"], "no answer"),
        ([trusted, f"tls.cert={expired.cert}", f"tls.key={expired.key}"], "no answer"),
        ([f"tls.ca={other.ca}", f"tls.cert={one.cert}", f"tls.key={one.key}"], "certificate verify failed"),
    ):
        with pytest.raises(UnavailableError, match=sentence):
            StreamClient(load(address, tmp_path, *overrides), "run", patience_s=1).ping()
    plain = load(address.replace("rediss", "redis"), tmp_path)
    with pytest.raises(UnavailableError, match="no answer"):
        StreamClient(plain, "run", patience_s=1).ping()
    (tmp_path / "word").write_text("admin\n")
    good = load(address, tmp_path, trusted, f"tls.cert={one.cert}", f"tls.key={one.key}")
    (tmp_path / "word").write_text("wrong\n")
    with pytest.raises(SettingsError, match="check user, password and rights"):
        StreamClient(good, "run", patience_s=1).ping()


def test_new_connections_use_certificates_that_were_replaced(address: str, tmp_path: Path, issuer: Issuer) -> None:
    one = issuer.issue("trainer")
    settings = load(address, tmp_path, f"tls.ca={issuer.ca}", f"tls.cert={one.cert}", f"tls.key={one.key}")
    client = StreamClient(settings, "run", patience_s=1)
    assert client.ping()
    with redis.Redis.from_url(
        address, username="forage-admin", password="admin",
        ssl_ca_certs=str(issuer.ca), ssl_certfile=str(one.cert), ssl_keyfile=str(one.key),
    ) as admin:  # fmt: skip
        admin.ping()  # it keeps this connection
        issuer.issue_expired("trainer")
        assert client.ping(), "an open connection goes on"
        admin.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(UnavailableError):
            client.ping()
        issuer.issue("trainer")
        assert client.ping()
