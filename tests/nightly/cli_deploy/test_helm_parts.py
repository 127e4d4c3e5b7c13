"""Parts of the chart in operation: fetch, secrets after an upgrade, dashboards and rules."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from deployment_tools import HELMS, REPOSITORY, find_helm
from helm_chart import (
    CHART,
    MATRIX,
    find_object,
    list_containers,
    list_pods,
    parse_objects,
    render,
    render_values,
)
from helm_cluster import Cluster, cluster

from forage_runtime.settings import load_settings

__all__ = ["cluster"]

FETCH = CHART / "files/fetch.py"


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command of the init container, in the retriever's environment, which is that of the image."""
    python = REPOSITORY / ".venvs/retriever/bin/python"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), str(FETCH), str(tmp_path / "data"), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


def _write_folder(place: Path, text: str) -> str:
    (place / "sub").mkdir(parents=True)
    (place / "manifest.json").write_text(text)
    (place / "sub/vectors.bin").write_bytes(b"\0" * 1000)
    return place.as_uri()


def _list_files(place: Path) -> set[str]:
    return {str(file.relative_to(place)) for file in place.rglob("*") if file.is_file()}


def test_fetch_copies_folders_archives_and_files_once(
    fetch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    first, second = _write_folder(tmp_path / "one", "one"), _write_folder(tmp_path / "two", "two")
    with tarfile.open(tmp_path / "two.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "two", ".")
    data, whole = tmp_path / "data", {"manifest.json", "sub/vectors.bin"}
    tar, file = (tmp_path / "two.tar.gz").as_uri(), f"{first}/manifest.json"
    ended = fetch(f"indexes/wiki={first}", f"models/policy={tar}", f"file.json={file}")
    assert ended.returncode == 0, ended.stderr
    assert _list_files(data / "indexes/wiki") == _list_files(data / "models/policy") == whole
    assert (data / "file.json").read_text() == "one"

    (data / "indexes/wiki/manifest.json").write_text("as the pods have it")
    assert "is there" in fetch(f"indexes/wiki={first}").stderr
    assert (data / "indexes/wiki/manifest.json").read_text() == "as the pods have it"
    assert fetch(f"indexes/wiki={second}").returncode == 0
    assert (data / "indexes/wiki/manifest.json").read_text() == "two"
    left = {path.name for path in (data / "indexes").iterdir()}
    assert left == {"wiki", ".wiki.url", ".wiki.lock"}


class _SlowStore(BaseHTTPRequestHandler):
    """A store with one file. It does not answer who first asks for what follows the first part."""

    content = bytes(range(256)) * (2**18 + 5)
    version = '"1"'
    sends_parts = True
    firsts: list[int]

    def do_HEAD(self) -> None:  # the name is http.server's
        self._answer(200, 0, len(self.content))

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "bytes=0-") if self.sends_parts else "bytes=0-"
        first, _, last = asked.removeprefix("bytes=").partition("-")
        self.firsts.append(int(first))
        part = self.content[int(first) : int(last) + 1 if last else None]
        self._answer(206 if self.sends_parts else 200, int(first), len(part))
        if int(first) and not self.server.asked.is_set():
            self.server.asked.set()
            self.server.end.wait(600)
            return
        with contextlib.suppress(ConnectionError):  # who asks for the size alone
            self.wfile.write(part)

    def _answer(self, status: int, first: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if self.version:
            self.send_header("ETag", self.version)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + length - 1}/{len(self.content)}")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def slow_store() -> Iterator[ThreadingHTTPServer]:
    handler = type("Handler", (_SlowStore,), {"firsts": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked, server.end = threading.Event(), threading.Event()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.end.set()
        server.shutdown()


@pytest.mark.parametrize(("before", "after", "goes_on"), [('"1"', '"1"', True), ('"1"', '"2"', False), ("", "", False)])
def test_a_fetch_that_is_stopped_leaves_no_copy_and_the_next_one_goes_on_with_the_same_file(
    slow_store: ThreadingHTTPServer, tmp_path: Path, before: str, after: str, goes_on: bool
) -> None:
    handler = slow_store.RequestHandlerClass
    handler.version = before
    python = str(REPOSITORY / ".venvs/retriever/bin/python")
    url = f"http://127.0.0.1:{slow_store.server_port}/vectors.bin"
    command = [python, str(FETCH), str(tmp_path), f"vectors.bin={url}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as stopped:
        assert slow_store.asked.wait(120), stopped.poll()
        stopped.terminate()
        assert stopped.wait(120) == -signal.SIGTERM
    assert not (tmp_path / "vectors.bin").exists()
    there = (tmp_path / ".vectors.bin.part/new").stat().st_size
    assert there > 0
    handler.firsts.clear()
    handler.version = after
    if not goes_on:
        handler.content = handler.content[::-1]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "vectors.bin").read_bytes() == handler.content
    assert not goes_on or min(first for first in handler.firsts if first) == there
    assert {path.name for path in tmp_path.iterdir()} == {"vectors.bin", ".vectors.bin.url", ".vectors.bin.lock"}


def test_a_server_that_sends_whole_files_only_is_read_too(
    fetch: Callable[..., subprocess.CompletedProcess[str]], slow_store: ThreadingHTTPServer, tmp_path: Path
) -> None:
    """As `python -m http.server` does, whatever part is asked for."""
    handler = slow_store.RequestHandlerClass
    handler.sends_parts = False
    ended = fetch(f"vectors.bin=http://127.0.0.1:{slow_store.server_port}/vectors.bin")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "data/vectors.bin").read_bytes() == handler.content


def test_a_fetch_goes_on_within_a_folder_only_if_its_files_are_the_same(
    fetch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    url = _write_folder(tmp_path / "one", "first")
    (tmp_path / "one/sub/vectors.bin").chmod(0)
    if os.access(tmp_path / "one/sub/vectors.bin", os.R_OK):
        (tmp_path / "one/sub/vectors.bin").unlink()
        (tmp_path / "one/sub/vectors.bin").symlink_to(tmp_path / "nowhere")
    assert fetch(f"wiki={url}").returncode == 1
    assert not (tmp_path / "data/wiki").exists()
    (tmp_path / "one/manifest.json").write_text("other")
    (tmp_path / "one/sub/vectors.bin").unlink()
    (tmp_path / "one/sub/vectors.bin").write_bytes(b"1" * 1000)
    ended = fetch(f"wiki={url}")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "data/wiki/manifest.json").read_text() == "other"
    assert not list((tmp_path / "data").glob(".wiki.part*"))


def test_fetch_does_not_touch_files_that_it_did_not_copy(
    fetch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    mine = tmp_path / "data/wiki"
    mine.mkdir(parents=True)
    (mine / "mine").touch()
    assert fetch(f"wiki={_write_folder(tmp_path / 'one', 'one')}").returncode == 0
    assert _list_files(mine) == {"mine"}


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file:///nowhere/at-all", "FileNotFoundError"),
        ("s9://bucket/x", "s9"),
    ],
)
def test_a_failed_fetch_leaves_no_files(
    fetch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, url: str, sentence: str
) -> None:
    ended = fetch(f"wiki={url}")
    assert ended.returncode == 1
    assert url in ended.stderr
    assert sentence in ended.stderr
    assert not (tmp_path / "data/wiki").exists()


def test_fetch_refuses_an_archive_with_a_path_outside_its_folder(
    fetch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    ended = fetch(f"wiki={(tmp_path / 'bad.tar').as_uri()}")
    assert ended.returncode == 1
    assert not (tmp_path / "data/escaped").exists()


@pytest.mark.parametrize("version", HELMS)
def test_an_upgrade_keeps_generated_secrets(version: str, cluster: Cluster) -> None:
    data = {"forage-trainer": base64.b64encode(b"kept-from-before").decode()}
    cluster.add("Secret", "forage-redis", "redis", data=data)
    ended = cluster.render({}, version, "--show-only", "templates/config/secrets.yaml")
    assert ended.returncode == 0, ended.stderr
    objects = parse_objects(ended.stdout)
    kept, new = find_object(objects, "Secret", "forage-redis"), find_object(objects, "Secret", "rollout-token")
    assert base64.b64decode(kept["data"]["forage-trainer"]) == b"kept-from-before"
    assert len(base64.b64decode(new["data"]["token"])) == len(base64.b64decode(kept["data"]["forage-cli"])) == 40


def test_added_rules_and_dashboards_are_installed_unchanged(tmp_path: Path) -> None:
    """Templates of Prometheus and Grafana are not rendered by Helm."""
    chart = tmp_path / "forage"
    shutil.copytree(CHART, chart)
    alert = {"alert": "TrainerStarved", "expr": "up == 0", "annotations": {"summary": "{{ $labels.job }} waits"}}
    group = {"groups": [{"name": "trainer", "rules": [alert]}]}
    (chart / "rules/added.yaml").write_text(yaml.safe_dump(group))
    (chart / "dashboards/added.json").write_text('{"title": "{{job}}"}\n')
    command = [str(find_helm("4.3")), "template", "forage", str(chart)]
    command += ["--api-versions", "monitoring.coreos.com/v1"]
    command += ["--set", "monitoring.dashboards.enabled=true,monitoring.labels.release=p"]
    ended = subprocess.run(command, capture_output=True, text=True)
    objects = parse_objects(ended.stdout)
    rule, dashboard = (
        find_object(objects, "PrometheusRule", "added"),
        find_object(objects, "ConfigMap", "dashboards-added"),
    )
    assert rule["spec"] == group
    assert rule["metadata"]["labels"]["release"] == "p"
    assert dashboard["data"] == {"default-forage-added.json": '{"title": "{{job}}"}\n'}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_chart_has_no_symbolic_links() -> None:
    """Helm would print a line for each whenever it loads the chart, and a packaged chart would lack the files."""
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]


def test_files_in_memory_count_towards_the_containers_that_copy_and_serve_them() -> None:
    values = {
        "retriever": {"data": {"kind": "memory", "size": "8Gi"}, "resources": {"limits": {"memory": "4Gi"}}},
        "fetch": [{"url": "s3://bucket/x", "path": "x", "for": ["retriever", "trainer"]}],
    }
    objects = render_values(values)
    [(_, pod)] = list_pods(find_object(objects, "Deployment", "-retriever"))
    limits = {
        container["name"]: container["resources"]["limits"]["memory"] for container, _ in list_containers(pod["spec"])
    }
    assert (limits["fetch"], limits["retriever"]) == ((2 + 8) * 2**30, (4 + 8) * 2**30)
    [(_, pod)] = list_pods(find_object(objects, "Job"))
    [other] = [container for container, _ in list_containers(pod["spec"]) if container["name"] == "fetch"]
    assert other["resources"]["limits"]["memory"] == "2Gi"


@pytest.mark.parametrize(("name", "kept"), [("defaults", True), ("local", False)])
def test_an_uninstall_keeps_the_volumes_of_redis_and_of_the_runs_or_neither(name: str, kept: bool) -> None:
    """A trainer refuses streams without their checkpoints."""
    redis = find_object(render(name), "StatefulSet")["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"]
    runs = find_object(render(name), "PersistentVolumeClaim")["metadata"].get("annotations", {})
    assert (redis == "Retain", runs.get("helm.sh/resource-policy") == "keep") == (kept, kept)


def test_names_fit_kuberay() -> None:
    long = {**MATRIX["trainer on Ray"], "fullnameOverride": "a-name-of-a-release-that-is-far-too-long"}
    assert len(find_object(render_values(long), "RayJob")["metadata"]["name"]) <= 47


def test_a_tag_of_all_images_is_that_of_parts_with_gpus_too() -> None:
    values = {"image": {"tag": "1.2.3"}, "trainer": {"gpu": {"count": 1}}, "retriever": {"image": {"tag": "mine"}}}
    values["retriever"]["gpu"] = {"count": 1}
    images = {
        container["name"]: container["image"]
        for item in render_values(values)
        for _, pod in list_pods(item)
        for container, _ in list_containers(pod["spec"])
    }
    assert images["trainer"] == "forage/trainer:1.2.3-gpu"
    assert images["rollout"] == "forage/rollout:1.2.3"
    assert images["retriever"] == "forage/retriever:mine"
    assert images["world"] == "forage/cli:1.2.3"


def test_ray_nodes_have_the_environment_of_a_local_ray() -> None:
    source = "".join(
        (REPOSITORY / f"services/rollout/forage_rollout/{name}.py").read_text()
        for name in ("deployments/cluster", "vllm_start/vllm_args")
    )
    expected = set(re.findall(r'^ +"((?:RAY_SERVE|VLLM|HF|TQDM|OMP)_[A-Z_]+)": ', source, re.MULTILINE))
    expected.discard("RAY_SERVE_CONTROL_LOOP_INTERVAL_S")  # only for small machines
    expected.discard("VLLM_RPC_BASE_PATH")  # each engine finds a folder for its sockets
    assert len(expected) > 8
    cluster = find_object(render("gpu-large"), "RayService")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
        environment = {entry["name"]: entry.get("value") for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert expected <= set(environment), expected - set(environment)
        assert environment["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"] == str(256 * 2**20)
        assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_the_frontend_uses_the_application_of_its_own_cluster() -> None:
    head = find_object(render("gpu-large"), "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]["template"][
        "spec"
    ]
    [front] = [container for container in head["containers"] if container["name"] == "front"]
    settings = load_settings(overrides=front["args"], environ={})
    assert (settings.rollout.ray_address, settings.rollout.use_existing_app) == ("auto", True)
    ray = {mount["mountPath"]: mount["name"] for mount in head["containers"][0]["volumeMounts"]}
    own = {mount["mountPath"]: mount["name"] for mount in front["volumeMounts"]}
    assert all(own[path] == ray[path] for path in ("/tmp", "/tmp/ray", "/dev/shm", "/data"))


def test_the_ray_serve_application_is_the_one_of_the_rollout() -> None:
    config = yaml.safe_load(find_object(render("gpu-large"), "RayService")["spec"]["serveConfigV2"])
    [application] = config["applications"]
    module, _, function = application["import_path"].partition(":")
    assert f"def {function}(" in (REPOSITORY / f"services/rollout/{module.replace('.', '/')}.py").read_text()
    run = application["args"]["run.id"]
    # As forage_rollout.deployments.cluster.get_application_name has it.
    assert application["name"] == f"forage-rollout-{run}"
    assert application["route_prefix"] is None


def test_the_reward_service_is_headless_and_lists_ready_replicas_only() -> None:
    service = find_object(render("defaults"), "Service", "-reward")["spec"]
    assert service["clusterIP"] == "None"
    assert not service.get("publishNotReadyAddresses")
    # A headless Service does not map ports: those of the container must equal those of the Service.
    [(_, pod)] = list_pods(find_object(render("defaults"), "Deployment", "-reward"))
    [container] = [container for container, is_init in list_containers(pod["spec"]) if not is_init]
    container_ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == container_ports


def test_the_retriever_scales_by_waiting_queries_where_prometheus_is_known_and_by_cpu_alone_elsewhere() -> None:
    kinds = {
        case: {item["kind"] for item in render(case) if item["metadata"]["name"].endswith("-retriever")}
        for case in ("gpu-large", "index in memory, KEDA by the stream only")
    }
    assert [("HorizontalPodAutoscaler" in own, "ScaledObject" in own) for own in kinds.values()] == [
        (True, False),
        (False, True),
    ]
    triggers = find_object(render("index in memory, KEDA by the stream only"), "ScaledObject", "-retriever")["spec"][
        "triggers"
    ]
    assert [trigger["type"] for trigger in triggers] == ["prometheus", "cpu"]
    query = triggers[0]["metadata"]["query"]
    metric = re.search(r"forage_retriever_\w+", query)
    assert metric is not None
    pages = (REPOSITORY / "docs/reference/metrics.md").read_text()
    assert f"`{metric[0]}`" in pages, "the metric exists"
