"""Runs containers of the chart as processes, with their command, environment and settings: their probes succeed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography import x509
from deployment_tools import REPOSITORY
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helm_chart import Object, find_object, list_containers, list_pods, read_settings, render, render_values
from waiting import WAIT_S, wait_until

from forage_runtime.security.certificates import issue_certificate, make_authority

GRACE_S = 20.0


class ContainerProcess:
    """The process of a container of a Deployment; only its ports and folders differ."""

    def __init__(
        self, component: str, values: Mapping[str, Any], folder: Path, free_address: Callable[[], str]
    ) -> None:
        objects = render_values({"console": {"enabled": component == "console"}, **values})
        [(_, pod)] = list_pods(find_object(objects, "Deployment", component))
        [self.container] = [container for container, is_init in list_containers(pod["spec"]) if not is_init]
        self.ports = {port["name"]: free_address().rpartition(":")[2] for port in self.container["ports"]}
        file = folder / "settings.yaml"
        file.write_text(self._relocate(read_settings(objects), folder))
        replacements = {"python": str(REPOSITORY / f".venvs/{component}/bin/python")}
        replacements["/etc/forage/settings/settings.yaml"] = str(file)
        given = {entry["name"]: entry["value"] for entry in self.container["env"] if "value" in entry}
        environment = {name: self._relocate(value, folder) for name, value in given.items()}
        paths = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        self.process = subprocess.Popen(
            [replacements.get(word, word) for word in self.container["command"]],
            env={**paths, **environment},
            cwd=Path(self._relocate(self.container.get("workingDir", "") + "/", folder)),
            stderr=(folder / "log").open("wb"),
        )

    def _relocate(self, text: str, folder: Path) -> str:
        for port in self.container["ports"]:
            text = text.replace(f"0.0.0.0:{port['containerPort']}", f"127.0.0.1:{self.ports[port['name']]}")
        text = text.replace("/etc/forage/", f"{folder}/etc/forage/")
        return text.replace("/data/", f"{folder}/data/").replace("/cache/", f"{folder}/cache/")

    def get_url(self, port: str, path: str, scheme: str) -> str:
        """Where a port of the container is reached here."""
        return f"{scheme.lower()}://127.0.0.1:{self.ports[port]}{path}"

    def passes(self, probe: str) -> bool:
        """Whether a probe succeeds now."""
        check: Object = self.container[probe]
        if "grpc" in check:
            [name] = [
                port["name"] for port in self.container["ports"] if port["containerPort"] == check["grpc"]["port"]
            ]
            with grpc.insecure_channel(f"127.0.0.1:{self.ports[name]}") as channel:
                try:
                    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                except grpc.RpcError:
                    return False
                return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
        get = check["httpGet"]
        try:
            # As the kubelet: it shows no certificate and verifies none.
            reply = httpx.get(self.get_url(get["port"], get["path"], get["scheme"]), timeout=WAIT_S, verify=False)
        except httpx.TransportError:
            return False
        return bool(200 <= reply.status_code < 400)


@pytest.fixture
def start(tmp_path: Path, free_address: Callable[[], str]) -> Iterator[Callable[..., ContainerProcess]]:
    processes: list[ContainerProcess] = []

    def start_component(component: str, values: Mapping[str, Any]) -> ContainerProcess:
        processes.append(ContainerProcess(component, values, tmp_path, free_address))
        return processes[-1]

    yield start_component
    for running in processes:
        running.process.kill()
        running.process.wait()


@pytest.mark.parametrize("component", ["reward", "retriever", "console"])
def test_a_container_passes_its_probes_and_exits_on_sigterm(
    component: str, start: Callable[..., ContainerProcess], tmp_path: Path
) -> None:
    write_volumes(tmp_path)
    # A relative path, as recipes have them, begins at the volume.
    running = start(component, {"settings": {"retriever": {"mode": "bm25"}, "data": {"corpus": "world/corpus.jsonl"}}})
    wait_for_probes(running, tmp_path)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(WAIT_S) == 0


def write_volumes(folder: Path) -> None:
    """Write what the volumes and Secrets of the pods contain."""
    corpus = folder / "data/world/corpus.jsonl"
    corpus.parent.mkdir(parents=True)
    corpus.write_text(json.dumps({"id": "1", "contents": '"Mongolia"\nThe capital is Ulaanbaatar.'}) + "\n")
    for service in ("console", "retriever", "reward", "rollout"):
        token = folder / f"etc/forage/{service}-token/token"
        token.parent.mkdir(parents=True)
        token.write_text(f"secret-of-{service}")


def wait_for_probes(running: ContainerProcess, folder: Path) -> None:
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        wait_until(
            lambda probe=probe: running.process.poll() is not None or running.passes(probe),
            (folder / "log").read_text,
            2 * WAIT_S,
        )
        assert running.process.poll() is None, (folder / "log").read_text()


@pytest.mark.parametrize(("component", "port"), [("reward", "health"), ("retriever", "http")])
def test_with_tls_probes_need_no_certificate_and_scrapes_do(
    component: str, port: str, start: Callable[..., ContainerProcess], tmp_path: Path
) -> None:
    write_volumes(tmp_path)
    authority = make_authority(tmp_path / "authority")
    issued = issue_certificate(authority, tmp_path / "authority", f"forage-{component}", ["127.0.0.1", "localhost"])
    secret = tmp_path / "etc/forage/tls"
    secret.mkdir(parents=True)
    for key, file in {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": authority.cert}.items():
        shutil.copy(file, secret / key)
    tls = {"enabled": True, "requireClientCert": True, "existingSecret": "wires"}
    values = {
        "tls": tls,
        "settings": {"retriever": {"mode": "bm25"}},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    }
    running = start(component, values)
    wait_for_probes(running, tmp_path)
    [endpoint] = find_object(render_values(values), "ServiceMonitor", f"-{component}")["spec"]["endpoints"]
    assert endpoint["port"] == port
    url = running.get_url(endpoint["port"], endpoint["path"], endpoint["scheme"])
    trusted = ssl.create_default_context(cafile=secret / endpoint["tlsConfig"]["ca"]["secret"]["key"])
    assert httpx.get(url, verify=trusted, timeout=WAIT_S).status_code in (401, 403)
    trusted.load_cert_chain(
        secret / endpoint["tlsConfig"]["cert"]["secret"]["key"], secret / endpoint["tlsConfig"]["keySecret"]["key"]
    )
    scraped = httpx.get(url, verify=trusted, timeout=WAIT_S)
    assert scraped.status_code == 200
    assert "forage_" in scraped.text
    assert httpx.get(url.replace("https:", "http:"), timeout=WAIT_S).status_code == 400


def test_several_trainer_processes_end_wrong_settings_with_the_exit_code_that_the_job_does_not_repeat(
    tmp_path: Path,
) -> None:
    """torchrun, as the Job starts it: rank 0 refuses the questions while the other one waits for it."""
    values = {"trainer": {"gpu": {"count": 2}, "terminationGracePeriodSeconds": 77}}
    job = find_object(render_values(values), "Job")["spec"]
    [container] = job["template"]["spec"]["containers"]
    assert "--shutdown-timeout=77" in container["command"], "SIGKILL comes when the pod's own time is over"
    environment = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    environment = {name: value for name, value in environment.items() if not name.startswith("FORAGE__")}
    python = str(REPOSITORY / ".venvs/trainer/bin/python")
    settings = [
        f"run.dir={tmp_path}",
        "data.train_files=[/no/such/train.parquet]",
        "trainer.health_address=127.0.0.1:0",
    ]
    ended = subprocess.run(
        [python if word == "python" else word for word in container["command"]] + settings,
        env={"PATH": os.environ["PATH"], "GLOO_SOCKET_IFNAME": "lo", **environment},
        cwd=REPOSITORY, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    [rule] = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert ended.returncode in rule["onExitCodes"]["values"], ended.stderr
    assert "/no/such/train.parquet" in ended.stderr
    assert "ChildFailedError" not in ended.stderr, "a sentence, no stack"


@pytest.fixture
def ray_node(tmp_path: Path) -> Path:
    """What the init container of a Ray node writes, from the Secret of the chart."""
    objects = render_values({"rollout": {"mode": "rayservice"}, "ray": {"tls": {"enabled": True}}})
    secret = find_object(objects, "Secret", "-ray-ca")["data"]
    for key, text in secret.items():
        file = tmp_path / "etc/forage/ray-ca" / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(text))
    target = tmp_path / "etc/forage/ray-tls"
    target.mkdir()
    cluster = find_object(objects, "RayService")["spec"]["rayClusterConfig"]
    spec = cluster["headGroupSpec"]["template"]["spec"]
    container = next(one for one in spec["initContainers"] if one["name"] == "ray-certificate")
    assert spec["initContainers"][0] == container, "the operator's own init container needs it"
    program = container["args"][0].replace("/etc/forage/", f"{tmp_path}/etc/forage/")
    environment = os.environ | {"POD_IP": "10.1.2.3", "FQ_RAY_IP": "cluster-head-svc.training.svc.cluster.local"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    return target


def test_a_ray_node_signs_a_certificate_for_its_own_addresses(ray_node: Path) -> None:
    certificate = x509.load_pem_x509_certificate((ray_node / "node.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(address) for address in names.get_values_for_type(x509.IPAddress)} == {"127.0.0.1", "10.1.2.3"}
    assert set(names.get_values_for_type(x509.DNSName)) == {"localhost", "cluster-head-svc.training.svc.cluster.local"}
    assert shutil.which("openssl"), "openssl is missing: apt-get install openssl"
    verified = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-CAfile", ray_node / "ca.pem", ray_node / "node.pem"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert verified.returncode == 0, verified.stderr
    assert (ray_node / "node.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("answer", "exit_code", "passes"),
    [
        ("<search> capital of Mongolia </search>\n<answer> Ulaanbaatar </answer>", 0, True),
        ("STATUS_TIMEOUT: the retriever did not reply", 1, False),
    ],
)
def test_helm_test_fails_if_the_question_fails(answer: str, exit_code: int, passes: bool, tmp_path: Path) -> None:
    """Runs the command of the test pod with a `forage` that prints this answer."""
    [(_, pod)] = list_pods(find_object(render("defaults"), "Pod", "test"))
    [(container, _)] = list_containers(pod["spec"])
    command = tmp_path / "forage"
    command.write_text(f"#!/bin/sh\ncat <<'E'\n{answer}\nE\nexit {exit_code}\n")
    command.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as rollout:
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        environment |= {"HOST": "127.0.0.1", "PORT": str(rollout.getsockname()[1])}
        environment["PATH"] = f"{tmp_path}:{REPOSITORY / '.venvs/cli/bin'}:{os.environ['PATH']}"
        command_line = [*container["command"], *container["args"]]
        ended = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert answer in ended.stdout
    assert (ended.returncode == 0) is passes
