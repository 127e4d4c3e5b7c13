"""docker-compose.yml and the files that it mounts: valid, hardened, consistent with settings, images and chart."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from compose_file import (
    FILE,
    PROFILES,
    SERVICES,
    Object,
    find_image_service,
    list_reachable,
    resolve_profile,
    run_config,
)
from deployment_tools import REPOSITORY, check_jsonschema
from release import list_images

from forage_cli.local.stack import SERVING, Program, list_addresses
from forage_queue.streams.users import Role
from forage_runtime.addresses import split_address
from forage_runtime.settings import Settings, load_settings

PROMETHEUS = REPOSITORY / "deploy/prometheus/prometheus.yml"
PROMETHEUS_TLS = REPOSITORY / "deploy/prometheus/prometheus-tls.yml"
PROVISIONING = REPOSITORY / "deploy/grafana/provisioning"
SETTINGS = "/etc/forage/settings.yaml"
SCRIPT = REPOSITORY / "scripts/compose.sh"
METRICS_ADDRESSES = {
    "retriever": "retriever.http_address",
    "reward": "reward.health_address",
    "rollout": "rollout.health_address",
    "trainer": "trainer.health_address",
    "console": "console.http_address",
}
"""Job of Prometheus → setting with the address of its metrics."""
TOKENS = {
    "rollout": ("retriever", "reward", "rollout"),
    "trainer": ("reward", "rollout"),
    "console": ("retriever", "reward", "rollout", "console"),
    "forage": ("retriever", "reward", "rollout"),
}
"""Service that uses Redis → sections whose token it shows or checks."""


@pytest.fixture(params=PROFILES)
def stack(request: pytest.FixtureRequest) -> Object:
    return resolve_profile(request.param)


def list_services(stack: Object) -> Iterator[tuple[str, Object]]:
    yield from stack["services"].items()


def _is_one_shot(service: Object) -> bool:
    return bool(service["restart"] == "no")


def _find_service(stack: Object, name: str) -> Object:
    return next(service for key, service in list_services(stack) if key in (name, f"{name}-gpu"))


def test_every_profile_has_every_service_once(stack: Object) -> None:
    running = [find_image_service(service) for _, service in list_services(stack) if not _is_one_shot(service)]
    assert sorted(filter(None, running)) == sorted(set(SERVICES) - {"cli"})
    others = {name for name, service in list_services(stack) if find_image_service(service) is None}
    assert others == {"redis", "exporter", "prometheus", "grafana"}
    assert {"world", "forage"} <= set(stack["services"])


def test_the_cpu_profile_is_the_default_without_the_command() -> None:
    assert set(json.loads(run_config("--format", "json").stdout)["services"]) == set(
        resolve_profile("cpu")["services"]
    ) - {"forage"}


def test_only_rollout_and_trainer_reserve_a_gpu_each() -> None:
    reserved = {}
    for profile in PROFILES:
        for name, service in list_services(resolve_profile(profile)):
            for device in service["deploy"]["resources"].get("reservations", {}).get("devices", []):
                assert device["capabilities"] == ["gpu"], name
                assert service["image"].endswith("-gpu"), name
                reserved[name] = device["device_ids"]
    assert reserved == {"rollout-gpu": ["0"], "trainer-gpu": ["1"]}


def _check_specification(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [check_jsonschema(), "--builtin-schema", "vendor.compose-spec", *files],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_file_is_valid_by_the_compose_specification(tmp_path: Path) -> None:
    files = [FILE]
    for profile in PROFILES:
        files.append(tmp_path / f"{profile}.json")
        files[-1].write_text(json.dumps(resolve_profile(profile)))
    checked = _check_specification(*files)
    assert checked.returncode == 0, checked.stdout


def test_the_specification_refuses_a_misspelt_key(tmp_path: Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(FILE.read_text().replace("  cap_drop:", "  cap_dropped:"))
    checked = _check_specification(wrong)
    assert checked.returncode == 1
    assert "cap_dropped" in checked.stdout


def test_containers_run_with_least_privilege(stack: Object) -> None:
    for name, service in list_services(stack):
        user, _, group = service["user"].partition(":")
        assert int(user) > 0, name
        assert group.isdigit(), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "devices", "network_mode", "pid", "ipc", "userns_mode"} & set(service), (
            name
        )


def test_containers_have_resource_limits_and_rotated_logs(stack: Object) -> None:
    for name, service in list_services(stack):
        limits = service["deploy"]["resources"]["limits"]
        assert float(limits["cpus"]) > 0, name
        assert int(limits["memory"]) >= 2**26, name
        assert limits["pids"] > 0, name
        assert {"max-size", "max-file"} <= set(service["logging"]["options"]), name
        for mount in service.get("tmpfs", []):
            assert "size=" in mount or find_image_service(service) is None, (name, mount)


def test_services_are_restarted_and_have_a_health_check(stack: Object) -> None:
    for name, service in list_services(stack):
        health = service.get("healthcheck", {})
        if _is_one_shot(service):
            assert health.get("disable") is True, name
            continue
        assert service["restart"] == (
            "on-failure:20" if find_image_service(service) == "trainer" else "unless-stopped"
        ), name
        assert {"interval", "timeout", "retries", "start_period"} <= set(health), name
        if find_image_service(service) is None:
            assert health["test"], name
        else:  # the image has the check; a trainer is not ready whenever it waits for a batch
            stage = (
                (REPOSITORY / "services/Dockerfile")
                .read_text()
                .partition(f"FROM runtime AS {find_image_service(service)}\n")[2]
            )
            check = stage.partition("HEALTHCHECK --")[2].partition("ENTRYPOINT")[0]
            assert ("/healthz" if find_image_service(service) == "trainer" else "/readyz") in check, name
            assert "test" not in health, name


def test_dependencies_are_awaited_until_healthy_or_completed(stack: Object) -> None:
    waits = {}
    for name, service in list_services(stack):
        for other, condition in service.get("depends_on", {}).items():
            completes = _is_one_shot(stack["services"][other])
            assert condition["condition"] == ("service_completed_successfully" if completes else "service_healthy"), (
                name
            )
            assert condition["required"] is True, name
            waits.setdefault(name.removesuffix("-gpu"), set()).add(other)
    assert waits == {
        "retriever": {"world"},
        "rollout": {"redis", "retriever", "reward"},
        "trainer": {"redis", "world"},
        "exporter": {"redis"},
        "grafana": {"prometheus"},
    }


def test_ports_are_published_on_loopback_only(stack: Object) -> None:
    published = {}
    for name, service in list_services(stack):
        for port in service.get("ports", []):
            assert ipaddress.ip_address(port["host_ip"]).is_loopback, name
            published[int(port["published"])] = (name.removesuffix("-gpu"), port["target"])
    assert published == {
        18610: ("retriever", 18610), 18630: ("rollout", 18630), 18632: ("rollout", 18632),
        18650: ("console", 18650), 9090: ("prometheus", 9090), 3000: ("grafana", 3000),
    }  # fmt: skip


def test_images_are_pinned_and_equal_those_of_the_chart(stack: Object) -> None:
    chart = yaml.safe_load((REPOSITORY / "deploy/helm/forage/Chart.yaml").read_text())
    values = yaml.safe_load((REPOSITORY / "deploy/helm/forage/values.yaml").read_text())
    for name, service in list_services(stack):
        repository, _, tag = service["image"].partition("@")[0].rpartition(":")
        assert repository, name
        assert any(letter.isdigit() for letter in tag), name
        if (own := find_image_service(service)) is not None:
            assert repository == values[own]["image"]["repository"], name
            assert tag.removesuffix("-gpu") == chart["appVersion"], name
            assert f"forage/{own}:{tag}" in list_images(chart["appVersion"]), name
    redis, exporter = values["redis"]["image"], values["redis"]["exporter"]["image"]
    tags = {name: stack["services"][name]["image"].partition("@")[0] for name in ("redis", "exporter")}
    assert tags["redis"] == f"{redis['repository']}:{redis['tag']}"
    # The alpine variant has a shell, which reads the password from its file.
    assert tags["exporter"] == f"{exporter['repository']}:{exporter['tag']}-alpine"


def test_mounted_files_exist_and_are_read_only(stack: Object) -> None:
    for name, service in list_services(stack):
        for mount in service.get("volumes", []):
            if mount["type"] == "bind":
                assert Path(mount["source"]).exists(), (name, mount)
                assert mount["read_only"] is True, (name, mount)
            else:
                assert mount["source"] in stack["volumes"], (name, mount)
    assert Path(stack["configs"]["recipe"]["file"]).is_file()
    created = next(line for line in SCRIPT.read_text().splitlines() if "for name in" in line)
    for name, secret in stack["secrets"].items():
        assert Path(secret["file"]) == REPOSITORY / "deploy/compose/secrets" / name
        assert f" {name}" in created
    assert "/deploy/compose/secrets/" in (REPOSITORY / ".gitignore").read_text().splitlines()


def test_every_volume_network_and_secret_is_used(stack: Object) -> None:
    used = {"volumes": set(), "networks": set(), "secrets": set()}
    for _, service in list_services(stack):
        used["volumes"] |= {mount["source"] for mount in service.get("volumes", []) if mount["type"] == "volume"}
        used["networks"] |= set(service["networks"])
        used["secrets"] |= {secret["source"] for secret in service.get("secrets", [])}
    for kind, names in used.items():
        assert names == set(stack[kind]), kind


def load_settings_of(stack: Object, service: Object) -> Settings:
    return load_settings(Path(stack["configs"]["recipe"]["file"]), environ=service["environment"])


def test_every_service_loads_its_settings_and_reaches_the_others(stack: Object) -> None:
    ports = {name: split_address(address)[1] for name, address in list_addresses(Settings(), list(Program)[1:]).items()}
    for name, service in list_services(stack):
        if find_image_service(service) is None or name == "world":
            continue
        settings = load_settings_of(stack, service)
        reachable = list_reachable(stack, service)
        for setting, address in list_addresses(settings, [*SERVING[1:], Program.TRAINER, Program.CONSOLE]).items():
            host, port = split_address(address)
            section = setting.partition(".")[0]
            assert port == ports[setting], (name, setting)
            if section == find_image_service(service):
                assert host == "0.0.0.0", (name, setting)
            elif find_image_service(service) not in ("retriever", "reward"):  # those call nobody
                assert find_image_service(reachable[host]) == section, (name, setting)
        assert [(config["source"], config["target"]) for config in service["configs"]] == [("recipe", SETTINGS)]
        if name != "forage":
            assert service["command"] == ["--config", SETTINGS], name


def test_trainer_and_rollout_reach_each_other_where_they_reach_redis(stack: Object) -> None:
    # With rollout.weights.transport=direct the trainer sends policies from the address from which it reaches Redis.
    shared = set(_find_service(stack, "trainer")["networks"]) & set(_find_service(stack, "rollout")["networks"])
    assert set(_find_service(stack, "redis")["networks"]) <= shared


def test_the_reward_service_is_on_internal_networks_with_its_callers(stack: Object) -> None:
    reward = stack["services"]["reward"]
    assert all(stack["networks"][network]["internal"] for network in reward["networks"])
    assert "redis" not in list_reachable(stack, reward)
    reaching = {
        name.removesuffix("-gpu")
        for name, service in list_services(stack)
        if "reward" in list_reachable(stack, service)
    }
    assert reaching == {"reward", "rollout", "trainer", "console", "forage", "prometheus"}


def test_only_the_users_of_redis_reach_it(stack: Object) -> None:
    reaching = [name for name, service in list_services(stack) if "redis" in list_reachable(stack, service)]
    callers = {name.removesuffix("-gpu") for name in reaching}
    assert callers == {"redis", "exporter", "rollout", "trainer", "console", "forage"}
    for name in callers - {"redis", "exporter"}:
        service = _find_service(stack, name)
        settings = load_settings_of(stack, service)
        assert settings.redis.url == "redis://redis:6379/0"
        secrets = {secret["target"] for secret in service["secrets"]}
        sections = TOKENS[name]
        tokens = {str(getattr(settings, section).auth_token_file) for section in sections}
        assert {str(settings.redis.password_file)} | tokens == secrets, name


def test_each_server_has_its_own_token_and_no_other(stack: Object) -> None:
    for name in ("retriever", "reward"):
        settings = load_settings_of(stack, stack["services"][name])
        [secret] = stack["services"][name]["secrets"]
        assert secret["target"] == str(getattr(settings, name).auth_token_file) == f"/run/secrets/{name}-token"


def test_redis_writes_to_disk_before_its_reply(stack: Object) -> None:
    command = stack["services"]["redis"]["command"][-1]
    for option in (
        "--appendonly yes",
        "--appendfsync always",
        "--maxmemory-policy noeviction",
        '--save ""',
        "--dir /data",
    ):
        assert option in command
    volumes = {mount["target"]: mount["source"] for mount in stack["services"]["redis"]["volumes"]}
    start = REPOSITORY / "deploy/helm/forage/files/redis"
    assert volumes == {"/data": "redis", "/etc/forage/redis": str(start)}
    assert command.startswith("exec sh /etc/forage/redis/start.sh ")


def test_each_service_has_its_own_user_of_redis(stack: Object) -> None:
    users = {}
    for name, service in list_services(stack):
        secrets = {secret["target"]: secret["source"] for secret in service.get("secrets", [])}
        if name in ("redis", "exporter") or not (source := secrets.get("/run/secrets/redis-password")):
            continue
        user = service["environment"]["FORAGE__REDIS__USERNAME"]
        users[name.removesuffix("-gpu")] = user
        assert source == user.replace("forage", "redis")
    roles = {"trainer": "trainer", "rollout": "rollout", "forage": "cli", "console": "console"}
    assert users == {name: f"forage-{role}" for name, role in roles.items()}
    server = {secret["target"]: secret["source"] for secret in stack["services"]["redis"]["secrets"]}
    folder = stack["services"]["redis"]["environment"]["PASSWORDS"]
    assert server == {f"{folder}/forage-{role}": f"redis-{role}" for role in Role if role is not Role.KEDA}


def test_files_of_a_run_are_on_a_volume(stack: Object) -> None:
    for name in ("rollout", "trainer"):
        service = _find_service(stack, name)
        settings = load_settings_of(stack, service)
        mounts = {mount["target"]: mount for mount in service["volumes"]}
        assert mounts["/data"]["source"] == "data"
        assert settings.run.dir == Path("/data/runs")
        for file in (*settings.data.train_paths, *settings.data.val_files):
            assert (Path(service["working_dir"]) / file).is_relative_to("/data")
        assert Path(service["working_dir"]) / settings.model.path == Path("/models/tiny-policy")
        assert (Path(mounts["/models"]["source"]) / "tiny-policy/config.json").exists()
    retriever = stack["services"]["retriever"]
    volumes = {mount["target"]: mount["source"] for mount in retriever["volumes"]}
    assert volumes == {"/data": "data", "/cache": "indexes"}
    assert load_settings_of(stack, retriever).retriever.cache_dir.is_relative_to("/cache")


def test_what_the_console_derives_from_runs_is_on_a_volume(stack: Object) -> None:
    console = stack["services"]["console"]
    volumes = {mount["target"]: mount["source"] for mount in console["volumes"] if mount["type"] == "volume"}
    assert volumes == {"/data": "data", "/cache": "console"}
    assert load_settings_of(stack, console).console.cache_dir.is_relative_to("/cache")
    assert not any(mount.startswith("/cache") for mount in console["tmpfs"]), "its memory is limited"


def test_the_environment_selects_another_recipe() -> None:
    resolved = json.loads(run_config("--format", "json", RECIPE="configs/countdown_tiny.yaml").stdout)
    assert resolved["configs"]["recipe"]["file"] == str(REPOSITORY / "configs/countdown_tiny.yaml")


@pytest.mark.parametrize("file", [PROMETHEUS, PROMETHEUS_TLS])
def test_prometheus_scrapes_every_component_under_its_name_in_the_chart(stack: Object, file: Path) -> None:
    scraped = yaml.safe_load(file.read_text())["scrape_configs"]
    reachable = list_reachable(stack, stack["services"]["prometheus"])
    assert {job["job_name"] for job in scraped} == {*METRICS_ADDRESSES, "redis"}
    ports = list_addresses(Settings(), list(Program)[1:])
    for job in scraped:
        (target,) = job["dns_sd_configs"]
        (host,) = target["names"]
        if job["job_name"] == "redis":
            assert reachable[host] is stack["services"]["exporter"]
            continue
        assert find_image_service(reachable[host]) == job["job_name"]
        assert target["port"] == split_address(ports[METRICS_ADDRESSES[job["job_name"]]])[1]
        # With two networks in common, one name would give two targets.
        assert len(set(reachable[host]["networks"]) & set(stack["services"]["prometheus"]["networks"])) == 1


def test_prometheus_accepts_its_configuration_and_finds_all_rule_files(stack: Object, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    for mount in stack["services"]["prometheus"]["volumes"]:
        if mount["type"] == "bind":
            place = tmp_path / Path(mount["target"]).relative_to("/etc/prometheus")
            place.symlink_to(mount["source"])
    ended = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert f"{len(list((REPOSITORY / 'deploy/prometheus/rules').glob('*.yaml')))} rule files found" in ended.stdout


def test_with_tls_prometheus_differs_only_in_how_it_speaks_to_the_services() -> None:
    plain, secure = (yaml.safe_load(file.read_text()) for file in (PROMETHEUS, PROMETHEUS_TLS))
    for job in secure["scrape_configs"]:
        if job["job_name"] == "redis":
            continue
        assert job.pop("scheme") == "https"
        tls = job.pop("tls_config")
        assert tls.pop("server_name") == job["job_name"], "targets are addresses, certificates are for names"
        folder = "/etc/prometheus/tls"
        assert tls == {
            "ca_file": f"{folder}/ca.pem",
            "cert_file": f"{folder}/prometheus.pem",
            "key_file": f"{folder}/prometheus.key",
        }
    assert plain == secure


def test_grafana_shows_nothing_without_a_login(stack: Object) -> None:
    grafana = stack["services"]["grafana"]
    environment = grafana["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == environment["GF_USERS_ALLOW_SIGN_UP"] == "false"
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana-password"
    assert [secret["source"] for secret in grafana["secrets"]] == ["grafana-password"]


def test_grafana_has_the_data_source_and_the_dashboards(stack: Object) -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yaml").read_text())["datasources"]
    host, port = split_address(source["url"].removeprefix("http://"))
    prometheus = list_reachable(stack, stack["services"]["grafana"])[host]
    assert port in {published["target"] for published in prometheus["ports"]}
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/forage.yaml").read_text())["providers"]
    mounts = {mount["target"]: Path(mount["source"]) for mount in stack["services"]["grafana"]["volumes"]}
    assert mounts["/etc/grafana/provisioning"] == PROVISIONING
    dashboards = list(mounts[provider["options"]["path"]].glob("*.json"))
    assert dashboards
    for file in dashboards:
        for uid in find_datasources(json.loads(file.read_text())):
            assert uid in (source["uid"], "${datasource}", "-- Grafana --"), file.name


def find_datasources(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        source = node.get("datasource")
        if isinstance(source, dict) and "uid" in source:
            yield source["uid"]
        for child in node.values():
            yield from find_datasources(child)
    elif isinstance(node, list):
        for child in node:
            yield from find_datasources(child)


def test_make_up_reports_a_missing_engine(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "tail", "env"):
        (tools / tool).symlink_to(str(shutil.which(tool)))

    def run_up(**environment: str) -> str:
        ended = subprocess.run(
            [SCRIPT, "up"], env={"PATH": str(tools), **environment}, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 2
        return ended.stderr

    assert "docker is missing: install Docker" in run_up()
    docker = shutil.which("docker", path=os.environ["PATH"])
    if docker is not None:
        (tools / "docker").symlink_to(docker)
        assert "no Docker engine answers" in run_up(DOCKER_HOST=f"unix://{tmp_path}/none.sock")


def test_an_unknown_command_is_refused() -> None:
    ended = subprocess.run([SCRIPT, "start"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "the command is 'start', expected up, down, logs or rotate" in ended.stderr


def test_services_listen_on_ipv6_where_the_environment_says_so() -> None:
    resolved = json.loads(run_config("--format", "json", LISTEN_HOST="[::]").stdout)
    for name in ("retriever", "reward", "rollout", "trainer", "console"):
        own = {key: value for key, value in resolved["services"][name]["environment"].items() if name.upper() in key}
        listening = {key: value for key, value in own.items() if key.endswith("_ADDRESS")}
        assert listening, name
        assert all(value.startswith("[::]:") for value in listening.values()), listening
