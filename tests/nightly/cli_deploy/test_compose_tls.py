"""deploy/compose/tls.yml over docker-compose.yml: every wire of Forage speaks TLS, and Prometheus scrapes them so."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
from pathlib import Path

import compose_certificates
import pytest
from compose_file import FILE, PROFILES, Object, find_image_service, run_config
from deployment_tools import REPOSITORY

from forage_runtime.settings import load_settings

OVERRIDE = REPOSITORY / "deploy/compose/tls.yml"
SECRETS = REPOSITORY / "deploy/compose/secrets/tls"
EXPORTER_FILES = tuple(f"REDIS_EXPORTER_TLS_{file}_FILE" for file in ("CLIENT_CERT", "CLIENT_KEY", "CA_CERT"))


@pytest.fixture(params=PROFILES)
def stack(request: pytest.FixtureRequest) -> Object:
    resolved = run_config("--format", "json", files=(FILE, OVERRIDE), COMPOSE_PROFILES=f"{request.param},command")
    assert resolved.returncode == 0, resolved.stderr
    loaded: Object = json.loads(resolved.stdout)
    return loaded


def read_holders() -> set[str]:
    """The services for which `scripts/compose.sh` makes certificates."""
    [names] = re.findall(
        r"scripts/compose_certificates\.py \"\$folder\" ([a-z ]+) \|\|", (REPOSITORY / "scripts/compose.sh").read_text()
    )
    return set(names.split())


def test_every_service_has_the_certificate_of_the_name_that_others_call(stack: Object) -> None:
    mounted = set()
    for name, service in stack["services"].items():
        if find_image_service(service) is None or name == "world":
            continue
        settings = load_settings(Path(stack["configs"]["recipe"]["file"]), environ=service["environment"])
        assert settings.tls.is_on, name
        assert settings.tls.require_client_cert, name
        [mount] = [one for one in service["volumes"] if one["target"] == "/etc/forage/tls"]
        assert mount["read_only"] is True
        holder = Path(mount["source"]).relative_to(SECRETS).name
        assert {settings.tls.cert, settings.tls.key, settings.tls.ca} == {
            Path(mount["target"]) / file for file in (f"{holder}.pem", f"{holder}.key", "ca.pem")
        }
        aliases = {alias for options in service["networks"].values() for alias in (options or {}).get("aliases") or ()}
        assert holder in {name, *aliases}
        mounted.add(holder)
    assert mounted | {"redis", "exporter", "prometheus"} == read_holders()


def test_the_override_adds_nothing_but_tls(stack: Object) -> None:
    resolved = run_config("--format", "json", COMPOSE_PROFILES="cpu,gpu,command")
    before = json.loads(resolved.stdout)["services"]
    for name, service in stack["services"].items():
        service.pop("volumes", None)
        plain = {key: value for key, value in before[name].items() if key != "volumes"}
        for variables in (service, plain):
            given = (variables.get("environment") or {}).items()
            variables["environment"] = {
                key: value.replace("rediss://", "redis://") for key, value in given if "TLS_" not in key
            }
        assert service == plain, name


def test_redis_speaks_tls_alone_and_its_clients_do(stack: Object) -> None:
    """`test_redis_server.py` starts it so."""
    redis, exporter = stack["services"]["redis"], stack["services"]["exporter"]
    for name, service, keys in (
        ("redis", redis, ("TLS_CERT", "TLS_KEY", "TLS_CA")),
        (
            "exporter",
            exporter,
            EXPORTER_FILES,
        ),
    ):
        files = [service["environment"][key] for key in keys]
        assert files == [f"/etc/forage/tls/{file}" for file in (f"{name}.pem", f"{name}.key", "ca.pem")]
        [mount] = [one for one in service["volumes"] if one["target"] == "/etc/forage/tls"]
        assert Path(mount["source"]) == SECRETS / name
        assert name in read_holders()
    assert "TLS_AUTH_CLIENTS" not in redis["environment"], "start.sh wants certificates unless it is no"
    assert exporter["environment"]["REDIS_ADDR"] == "rediss://redis:6379"
    for name, service in stack["services"].items():
        if find_image_service(service) is not None and name != "world":
            assert service["environment"]["FORAGE__REDIS__URL"] == "rediss://redis:6379/0", name


def test_prometheus_reads_the_configuration_with_its_certificate(stack: Object, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    mounts = {mount["target"]: mount["source"] for mount in stack["services"]["prometheus"]["volumes"]}
    compose_certificates.make_certificates(tmp_path, ["prometheus"], datetime.datetime.now(datetime.UTC))
    assert Path(mounts["/etc/prometheus/tls"]) == SECRETS / "prometheus"
    text = Path(mounts["/etc/prometheus/prometheus.yml"]).read_text()
    text = text.replace("/etc/prometheus/tls", str(tmp_path / "prometheus"))
    (tmp_path / "prometheus.yml").write_text(text.replace("rules/", mounts["/etc/prometheus/rules"] + "/"))
    assert text.count("scheme: https") == 5
    checked = subprocess.run([promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
