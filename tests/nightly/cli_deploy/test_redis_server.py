"""The Redis of compose and chart, started as in its container: durable, its users, TLS, renewed files, the exporter."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from certificates import Issuer
from helm_chart import find_object, list_containers, list_pods, render_values
from waiting import wait_until

from forage_proto.v1.trajectory_pb2 import Prompt
from forage_queue.streams.client import StreamClient
from forage_queue.streams.durability import check_durability
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings

WITHOUT_TLS: Mapping[str, Any] = {"enabled": False}
BOTH_WAYS: Mapping[str, Any] = {"enabled": True, "requireClientCert": True, "existingSecret": "wires"}
StartExporter = Callable[[], contextlib.AbstractContextManager[str]]
ONE_WAY: Mapping[str, Any] = {"enabled": True, "existingSecret": "wires"}


@dataclass
class Container:
    """The chart's Redis as a process of this machine; only its port and folders differ."""

    folder: Path
    port: str
    tls: Mapping[str, Any] = field(default_factory=lambda: WITHOUT_TLS)

    def __post_init__(self) -> None:
        objects = render_values({"tls": self.tls, "redis": {"exporter": {"enabled": True}}})
        [(_, pod)] = list_pods(find_object(objects, "StatefulSet", "redis"))
        self._containers = {one["name"]: one for one, _ in list_containers(pod["spec"])}
        for folder in ("redis", "redis-passwords", "tls", "state"):
            (self.folder / folder).mkdir(parents=True)
        for name, content in find_object(objects, "ConfigMap", "redis-start")["data"].items():
            (self.folder / "redis" / name).write_text(content)
        for name, value in find_object(objects, "Secret", "redis")["data"].items():
            (self.folder / "redis-passwords" / name).write_bytes(base64.b64decode(value))
        if self.tls["enabled"]:
            self.renew(Issuer(self.folder / "authority"))

    @property
    def url(self) -> str:
        return f"{'rediss' if self.tls['enabled'] else 'redis'}://localhost:{self.port}/0"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def get_password_file(self, role: str) -> Path:
        return self.folder / f"redis-passwords/forage-{role}"

    def renew(self, issuer: Issuer, *keys: str) -> None:
        """Replace the files of the Secret, or these of it, by those of a new certificate."""
        issued = issuer.issue("redis")
        for key, file in {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": issuer.ca}.items():
            if not keys or key in keys:
                shutil.copy(file, self.folder / "tls" / key)

    def read_environment(self, name: str) -> dict[str, str]:
        """What a container of the pod gets, with the paths of this machine."""
        given = {one["name"]: one["value"] for one in self._containers[name]["env"] if "value" in one}
        return {key: self._relocate(value) for key, value in given.items()}

    @contextlib.contextmanager
    def run(self) -> Iterator[str]:
        """The running server's URL. What it prints is in `log`."""
        container = self._containers["redis"]
        assert container["command"] == ["sh", "/etc/forage/redis/start.sh"]
        options = [str(self.folder / "state") if value == "/data" else value for value in container["args"]]
        port = "--tls-port" if self.tls["enabled"] else "--port"
        command = ["sh", str(self.folder / "redis/start.sh"), *options, port, self.port, "--bind", "127.0.0.1"]
        own = {"STATE": str(self.folder / "state"), "RELOAD_S": "0.1"}
        environ = {**os.environ, **self.read_environment("redis"), **own}
        with (
            (self.folder / "log").open("wb") as log,
            subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True) as server,
        ):
            try:
                yield self.url
            finally:
                os.killpg(server.pid, signal.SIGKILL)  # the loop that reads files again too

    def probe(self) -> bool:
        """Run the probe of the container once."""
        probes = (self._containers["redis"][f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
        [words] = {tuple(probe["exec"]["command"]) for probe in probes}
        environ = {**os.environ, **self.read_environment("redis"), "STATE": str(self.folder / "state")}
        command = [self._relocate(word) for word in words]
        return not subprocess.run(command, env=environ, capture_output=True).returncode

    def make_exporter_arguments(self) -> list[str]:
        """The arguments of the exporter's container, for the port of this machine."""
        arguments = self._containers["exporter"]["args"]
        return [argument.replace("localhost:6379", f"localhost:{self.port}") for argument in arguments]

    def connect(self, role: str, **files: Path) -> StreamClient:
        """A client with a service's user or none, and with the files of the pod unless others are given."""
        if self.tls["enabled"] and not files:
            names = {"ca_file": "ca.crt", "cert_file": "tls.crt", "key_file": "tls.key"}
            files = {setting: self.folder / "tls" / name for setting, name in names.items()}
        settings = RedisSettings(
            url=self.url,
            username=f"forage-{role}" if role else "",
            password_file=self.get_password_file(role) if role else None,
            timeout_s=1,
            **files,
        )
        return StreamClient(settings, "demo", patience_s=1)

    def open_as(self, role: str) -> StreamClient:
        """As `connect`, once the server answers and has its functions."""
        client = self.connect(role)
        wait_until(lambda: answers(client), lambda: self.log)
        return client

    def _relocate(self, text: str) -> str:
        return text.replace("/etc/forage/", f"{self.folder}/")


def answers(client: StreamClient) -> bool:
    """Whether the server has let this client in and has its functions."""
    try:
        client.read_replicas()
    except UnavailableError:
        return False
    return True


@pytest.fixture(params=[WITHOUT_TLS, BOTH_WAYS], ids=["plain", "tls"])
def container(request: pytest.FixtureRequest, tmp_path: Path, free_address: Callable[[], str]) -> Container:
    if not (shutil.which("redis-server") and shutil.which("redis-cli")):
        pytest.skip("needs redis-server and redis-cli: apt-get install redis-server as root")
    return Container(tmp_path / "pod", free_address().rpartition(":")[2], request.param)


with_tls = pytest.mark.parametrize("container", [BOTH_WAYS], ids=["tls"], indirect=True)


def test_it_is_durable_and_has_a_user_for_each_program(container: Container) -> None:
    for start in range(2):  # data survives a kill
        with container.run():
            trainer = container.open_as("trainer")
            assert container.probe()
            assert check_durability(trainer, RedisSettings(url=container.url)) == []
            if start == 0:
                trainer.create_groups()
                trainer.acquire_epoch()
                assert trainer.issue(Prompt(group_uid="uid", batch=1))
                with pytest.raises(SettingsError, match="refuses this client"):
                    container.open_as("rollout").acquire_epoch()
                with pytest.raises(SettingsError, match="refuses this client"):
                    container.connect("").ping()
            assert [issue.group_uid for issue in trainer.read_issued()] == ["uid"]
    assert not container.probe()


def test_a_password_that_changes_is_read_while_redis_runs(container: Container) -> None:
    with container.run():
        trainer = container.open_as("trainer")
        file = container.get_password_file("trainer")
        old = file.read_text().strip()
        files = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
        tls = {name: str(container.folder / "tls" / file) for name, file in files.items() if container.tls["enabled"]}

        def may(password: str) -> bool:
            try:
                with redis.Redis.from_url(container.url, username="forage-trainer", password=password, **tls) as client:
                    return bool(client.ping())
            except redis.ConnectionError:  # refused, or closed while the server reads its users again
                return False

        for text, valid in ((f"{old}\nnew\n", {old, "new"}), ("new\n", {"new"})):
            file.write_text(text)
            wait_until(lambda valid=valid: {word for word in (old, "new") if may(word)} == valid)
            assert trainer.count_backlog(trainer.prompts) == 0


@with_tls
def test_it_speaks_tls_alone_and_wants_a_certificate_of_its_authority(container: Container, tmp_path: Path) -> None:
    other = Issuer(tmp_path / "other")
    stranger, trusted = other.issue("stranger"), container.folder / "tls/ca.crt"
    with container.run():
        container.open_as("trainer")
        with pytest.raises(UnavailableError):
            container.connect("trainer", ca_file=trusted).ping()
        with pytest.raises(UnavailableError):
            container.connect("trainer", ca_file=trusted, cert_file=stranger.cert, key_file=stranger.key).ping()
        with pytest.raises(UnavailableError, match="certificate verify failed"):
            container.connect("trainer", ca_file=other.ca).ping()
        with pytest.raises(redis.ConnectionError), redis.Redis(port=int(container.port)) as plain:
            plain.ping()


@pytest.mark.parametrize("container", [ONE_WAY], indirect=True)
def test_without_client_certificates_the_authority_is_enough(container: Container) -> None:
    with container.run():
        container.open_as("trainer")
        assert container.connect("trainer", ca_file=container.folder / "tls/ca.crt").ping()


@with_tls
def test_a_renewed_certificate_is_shown_without_a_restart_and_a_wrong_one_is_not(
    container: Container, tmp_path: Path
) -> None:
    """Of another authority, too: nothing that the server trusted before is left."""
    issuer = Issuer(tmp_path / "new")
    own = issuer.issue("trainer")
    files = {"ca_file": issuer.ca, "cert_file": own.cert, "key_file": own.key}
    with container.run():
        before = container.open_as("trainer")
        container.renew(issuer, "tls.key")
        wait_until(lambda: "certificates were not loaded: ERR" in container.log, lambda: container.log)
        assert container.log.count("not loaded") == 1, "said once, not with every look"
        assert not answers(container.connect("trainer", **files))
        assert container.probe()
        container.renew(issuer)
        wait_until(lambda: answers(container.connect("trainer", **files)), lambda: container.log)
        assert "the certificates were loaded again" in container.log
        assert answers(before), "an open connection goes on"
        assert container.log.count("Ready to accept connections") == 1


@with_tls
def test_it_does_not_start_without_its_files(container: Container) -> None:
    (container.folder / "tls/tls.key").unlink()
    with container.run():
        wait_until(lambda: "tls.key' cannot be read: give PEM files in TLS_CERT, TLS_KEY and TLS_CA" in container.log)


@pytest.fixture
def exporter(container: Container, free_address: Callable[[], str]) -> StartExporter:
    """Debian's redis_exporter with what its container gets; yields its address."""
    binary = shutil.which("prometheus-redis-exporter")
    if not binary:
        pytest.skip("needs redis_exporter: apt-get install prometheus-redis-exporter as root")

    @contextlib.contextmanager
    def start() -> Iterator[str]:
        address = free_address()
        command = [binary, *container.make_exporter_arguments(), f"--web.listen-address={address}"]
        password = {"REDIS_PASSWORD": container.get_password_file("exporter").read_text().strip()}
        environ = {**os.environ, **container.read_environment("exporter"), **password}
        with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
            try:
                yield address
            finally:
                process.kill()

    return start


def test_the_exporter_measures_what_alerts_need_with_its_own_user(
    container: Container, exporter: StartExporter, tmp_path: Path
) -> None:
    text = ""

    def scrape() -> bool:
        nonlocal text
        with contextlib.suppress(httpx.TransportError):
            text = httpx.get(f"http://{address}/metrics", trust_env=False).text
        return "redis_up 1" in text

    with container.run():
        trainer = container.open_as("trainer")
        trainer.create_groups()
        trainer.acquire_epoch()
        trainer.issue(Prompt(group_uid="uid", batch=1))
        with exporter() as address:
            wait_until(scrape, lambda: text[-2000:])
            for name in ("memory_used_bytes", "memory_max_bytes", "aof_enabled", "aof_last_write_status"):
                assert f"redis_{name} " in text
            assert 'redis_stream_length{db="db0",stream="forage:{demo}:prompts"} 1' in text
            assert 'redis_stream_group_consumers{db="db0",group="forage",stream="forage:{demo}:prompts"}' in text
            if container.tls["enabled"]:
                container.renew(Issuer(tmp_path / "new"))
                wait_until(lambda: "loaded again" in container.log)
                wait_until(scrape, lambda: text[-2000:])
