"""The profile `hardened` in compose and in the chart: no service lacks anything, and each key is where it is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from compose_file import FILE, PROFILES, SERVICES, Object, find_image_service, run_config
from deployment_tools import REPOSITORY
from helm_chart import list_containers, list_pods, read_settings, render_values

from forage_runtime.errors import SettingsError
from forage_runtime.security.profile import check_profile, list_missing
from forage_runtime.security.signatures import Signer, VerifyKeys
from forage_runtime.settings import Settings, load_settings

FILES = (FILE, REPOSITORY / "deploy/compose/tls.yml", REPOSITORY / "deploy/compose/hardened.yml")
CHART_VALUES: Mapping[str, Any] = {
    "tls": {"enabled": True, "requireClientCert": True, "existingSecret": "wires"},
    "signing": {"existingSecret": "signing-keys"},
    "settings": {"security": {"profile": "hardened", "user_code": "require"}},
    "console": {"enabled": True},
}
RUNNING = set(SERVICES) - {"cli"}


def resolve(profile: str) -> Object:
    resolved = run_config("--format", "json", files=FILES, COMPOSE_PROFILES=f"{profile},command")
    assert resolved.returncode == 0, resolved.stderr
    stack: Object = json.loads(resolved.stdout)
    return stack


@pytest.mark.parametrize("profile", PROFILES)
def test_no_service_of_compose_lacks_anything(profile: str) -> None:
    stack, checked, keys = resolve(profile), set(), {}
    for name, container in stack["services"].items():
        service = find_image_service(container)
        if service is None or name == "world":
            continue
        settings = load_settings(Path(stack["configs"]["recipe"]["file"]), environ=container["environment"])
        secrets = {secret["target"].rpartition("/")[2] for secret in container["secrets"]}
        keys[service] = secrets & {"signing-key", "verify-key"}
        security = settings.security
        files = [file for file in (security.signing_key_file, security.verify_key_file) if file is not None]
        assert {file.name for file in files} == keys[service]
        if service == "cli":
            continue
        assert security.profile == "hardened"
        assert list(list_missing(settings, service)) == [], name
        checked.add(service)
    assert checked == RUNNING
    assert {service: held for service, held in keys.items() if held} == {
        "trainer": {"signing-key", "verify-key"},
        "rollout": {"verify-key"},
        "cli": {"verify-key"},
    }


def render_services(values: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Settings, set[str]]]:
    """Each service of the chart, the settings of its containers, and the names of the keys that they can read."""
    objects = render_values(values)
    file = folder / "settings.yaml"
    file.write_text(read_settings(objects))
    for item in objects:
        service = item["metadata"].get("labels", {}).get("app.kubernetes.io/component")
        if service not in RUNNING:
            continue
        for _, pod in list_pods(item):
            mounted = [one["secret"]["items"] for one in pod["spec"]["volumes"] if one["name"] == "signing"]
            keys = {one["path"] for items in mounted for one in items}
            for container, is_init in list_containers(pod["spec"]):
                if not is_init:
                    given = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
                    yield service, load_settings(file, environ=given), keys


def test_no_service_of_the_chart_lacks_anything(tmp_path: Path) -> None:
    keys = {}
    for service, settings, keys[service] in render_services(CHART_VALUES, tmp_path):
        assert settings.security.profile == "hardened"
        assert list(list_missing(settings, service)) == [], service
    assert set(keys) == RUNNING
    assert {service: held for service, held in keys.items() if held} == {
        "trainer": {"signing-key.pem", "verify-key.pem"},
        "rollout": {"verify-key.pem"},
    }


@pytest.mark.parametrize(
    ("left_out", "services", "lack"),
    [
        ("tls", RUNNING, "TLS (set tls.cert"),
        ("tls", {"trainer", "rollout"}, "TLS to Redis (write rediss://"),
        ("signing", {"trainer", "rollout"}, "signatures (set security.require_signed"),
    ],
)
def test_each_service_of_the_chart_names_what_is_left_out(
    left_out: str, services: set[str], lack: str, tmp_path: Path
) -> None:
    values = {name: value for name, value in CHART_VALUES.items() if name != left_out}
    refused = set()
    for service, settings, _ in render_services(values, tmp_path):
        try:
            check_profile(settings, service)
        except SettingsError as error:
            refused |= {service} if lack in str(error) else set()
    assert refused == services


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make up` needs of a checkout, with an engine that records its calls and starts nothing."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    for script in ("compose.sh", "compose_certificates.py"):
        shutil.copy(REPOSITORY / "scripts" / script, root / "scripts")
    (root / "scripts/setup.sh").write_text("#!/bin/sh\n")
    (root / "scripts/setup.sh").chmod(0o755)
    (root / ".venvs").symlink_to(REPOSITORY / ".venvs")
    engine = tmp_path / "bin/docker"
    engine.parent.mkdir()
    engine.write_text(
        "#!/bin/sh\n"
        f'echo "$COMPOSE_FILE $SIGNING_GROUP $*" >> {tmp_path}/calls\n'
        'case "$*" in *version*) echo 2.40.3 ;; *"up --detach"*) exit 7 ;; esac\n'
    )
    engine.chmod(0o755)
    return root


def make_up(checkout: Path, **variables: str) -> list[str]:
    """What the engine was asked by `compose.sh up`."""
    environ = {**os.environ, "PATH": f"{checkout.parent / 'bin'}:{os.environ['PATH']}", **variables}
    command = [checkout / "scripts/compose.sh", "up"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 7, ended.stderr
    return (checkout.parent / "calls").read_text().splitlines()


def test_make_up_makes_a_key_pair_that_the_trainer_may_read_and_others_may_not(checkout: Path) -> None:
    calls = make_up(checkout, HARDENED="1")
    names = ":".join(str(file.relative_to(REPOSITORY)) for file in FILES)
    assert calls[-1].startswith(f"{names} {os.getgid()} compose up --detach")
    folder = checkout / "deploy/compose/secrets/signing"
    private = folder / "signing-key.pem"
    assert stat.S_IMODE(private.stat().st_mode) == 0o640
    assert private.stat().st_gid == os.getgid()
    signer, keys = Signer(private), VerifyKeys(folder / "verify-key.pem")
    assert set(keys.keys) == {signer.key_id}
    for holder in ("redis", "exporter", "trainer"):
        assert (checkout / f"deploy/compose/secrets/tls/{holder}/{holder}.pem").exists()
    made = private.read_bytes()
    make_up(checkout, HARDENED="1")
    assert private.read_bytes() == made


def test_without_it_make_up_makes_neither_keys_nor_certificates(checkout: Path) -> None:
    assert make_up(checkout)[-1].strip().startswith("compose up --detach"), "no key, so no group that reads it"
    assert {file.name for file in (checkout / "deploy/compose/secrets").iterdir() if file.is_dir()} == set()


def test_the_group_of_the_private_key_is_the_trainers_alone() -> None:
    for profile in PROFILES:
        groups = {name: one.get("group_add") for name, one in resolve(profile)["services"].items()}
        assert {re.sub("-gpu$", "", name) for name, given in groups.items() if given} == {"trainer"}
