"""The images: rules for the Dockerfile, and with FORAGE_DOCKER_TESTS=1 three images built and run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tools
import yaml
from deployment_tools import REPOSITORY, find_hadolint
from helm_chart import CHART, list_containers, list_pods, render
from waiting import wait_until

from forage_runtime.settings import Settings

SERVICES = tuple(tools.HOMES)
"""Images, named like the folders in services/."""
GPU_SERVICES = ("retriever", "rollout", "trainer")
OWNER = "10001:10001"
SCRIPT = REPOSITORY / "scripts/images.sh"
DOCKERFILE = REPOSITORY / "services/Dockerfile"
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]


class Instruction(NamedTuple):
    """An instruction of a Dockerfile, with continued lines joined."""

    name: str
    value: str


def read_instructions() -> list[Instruction]:
    """Read all instructions of the Dockerfile."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [Instruction(*re.split(r"\s+", line, maxsplit=1)) for line in joined.splitlines() if line.strip()]


def read_stages() -> dict[str, list[Instruction]]:
    """Read the stages: name → instructions, FROM first."""
    by_stage: dict[str, list[Instruction]] = {}
    stage = ""
    for instruction in read_instructions():
        if instruction.name == "FROM":
            stage = instruction.value.partition(" AS ")[2]
        by_stage.setdefault(stage, []).append(instruction)
    return by_stage


def read_final_stages(image: str) -> list[Instruction]:
    """Read what an image adds to its base: the stage that all images share, then its own."""
    assert read_stages()[image][0].value == f"runtime AS {image}"
    return [*read_stages()["runtime"], *read_stages()[image]]


def select_values(instructions: list[Instruction], name: str) -> list[str]:
    """Select the values of all instructions with this name."""
    return [instruction.value for instruction in instructions if instruction.name == name]


def read_environment(image: str) -> dict[str, str]:
    return dict(
        entry.split("=", 1) for text in select_values(read_final_stages(image), "ENV") for entry in text.split()
    )


every_image = pytest.mark.parametrize("image", SERVICES)


def test_hadolint_reports_nothing() -> None:
    ended = subprocess.run([find_hadolint(), "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_base_images_are_arguments_with_pinned_versions() -> None:
    instructions = read_instructions()
    arguments = dict(value.split("=", 1) for value in select_values(instructions, "ARG") if "=" in value)
    known: set[str] = set()
    for source in select_values(instructions, "FROM"):
        base, _, stage = source.partition(" AS ")
        if base not in known:
            argument = re.fullmatch(r"\$\{(\w+)\}", base)
            assert argument, f"FROM {base} is neither a stage nor an ARG"
            default = arguments[argument[1]]
            assert default in known or re.fullmatch(r"[a-z/-]+:v?\d+\.\d+[\w.-]*", default), default
        known.add(stage)
    assert set(SERVICES) < known


@every_image
def test_an_image_is_built_in_a_separate_stage(image: str) -> None:
    final = read_final_stages(image)
    assert not select_values(final, "RUN"), "the last layers are copied, nothing is installed in them"
    assert all("build" not in value or value.startswith("--from=build") for value in select_values(final, "COPY"))


def test_the_build_needs_no_network_syntax_and_no_recent_builder() -> None:
    text = DOCKERFILE.read_text()
    names = [instruction.name for instruction in read_instructions()]
    assert "ADD" not in names, "ADD downloads and unpacks: use COPY"
    for refused in ("# syntax", "<<", "--link", ":latest", "https://"):
        assert refused not in text, refused


@every_image
def test_an_image_runs_as_an_unprivileged_user(image: str) -> None:
    assert select_values(read_final_stages(image), "USER") == [OWNER]
    names = [instruction.name for instruction in read_final_stages(image)]
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_only_locked_packages_are_installed() -> None:
    instructions = read_stages()["build"]
    [run] = [value for value in select_values(instructions, "RUN") if "setup.sh" in value]
    assert "--production" in run
    assert run.split()[-1] == '"$SERVICE"'
    assert any("${HOME_OF_SERVICE}/requirements*.lock" in value for value in select_values(instructions, "COPY"))
    installs = re.findall(r"pip install.*", (REPOSITORY / "scripts/setup.sh").read_text())
    assert all("--no-deps" in line or "--require-hashes" in line for line in installs), installs


@every_image
def test_copied_files_exist_and_are_in_the_build_context(image: str) -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in lines if line.startswith("!")]
    for value in select_values([*read_stages()["build"], *read_final_stages(image)], "COPY"):
        if value.startswith("--from="):
            continue
        home = str(tools.HOMES[image].relative_to(REPOSITORY))
        for source in value.replace("${SERVICE}", image).replace("${HOME_OF_SERVICE}", home).split()[:-1]:
            found = sorted(REPOSITORY.glob(source))
            assert found, source
            below = [file for path in found for file in (path.iterdir() if path.is_dir() else [path])]
            kept = [path for path in below if any(path.is_relative_to(REPOSITORY / entry) for entry in sent)]
            assert kept, f".dockerignore excludes all of {source}"


@every_image
def test_processes_receive_signals_without_a_shell(image: str) -> None:
    final = read_final_stages(image)
    for name in ("ENTRYPOINT", "CMD"):
        for value in select_values(final, name):
            assert all(isinstance(word, str) for word in json.loads(value)), f"{name} {value} uses a shell"
    assert select_values(final, "STOPSIGNAL") == []


@every_image
def test_labels_describe_the_image(image: str) -> None:
    text = " ".join(select_values(read_final_stages(image), "LABEL"))
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', text))
    assert labels["title"] == "forage/${SERVICE}"
    assert labels["description"]
    assert labels["licenses"] == "Apache-2.0"
    for label in ("version", "revision", "created"):
        assert labels[label] == f"${{{label.upper()}}}"
        assert any(value.startswith(f"{label.upper()}=") for value in select_values(read_final_stages(image), "ARG"))


@every_image
def test_the_health_check_calls_the_address_of_the_service(image: str) -> None:
    [check] = select_values(read_final_stages(image), "HEALTHCHECK")
    if image == "cli":
        assert check == "NONE"
        return
    command = json.loads(check.partition("CMD ")[2])
    assert command[:2] == ["python", "services/healthcheck.py"]
    variable, path = command[2:]
    assert variable in read_environment(image)
    assert path in ("/healthz", "/readyz")


@pytest.mark.parametrize("image", [image for image in SERVICES if image != "cli"])
def test_a_service_listens_on_all_addresses_at_its_default_ports(image: str) -> None:
    own = getattr(Settings(), image).model_dump()
    expected = {
        f"FORAGE__{image.upper()}__{name.upper()}": f"0.0.0.0:{address.rpartition(':')[2]}"
        for name, address in own.items()
        if re.fullmatch(r"(grpc|http|health)_address", name)
    }
    assert {name: value for name, value in read_environment(image).items() if name.startswith("FORAGE__")} == expected
    [ports] = select_values(read_final_stages(image), "EXPOSE")
    assert sorted(ports.split()) == sorted(value.rpartition(":")[2] for value in expected.values())


def test_images_differ_only_in_their_base_and_their_lock() -> None:
    instructions, stages = read_instructions(), read_stages()
    assert "BASE=cpu" in select_values(instructions, "ARG")
    assert stages["build"][0].value == "${BASE} AS build"
    assert stages["runtime"][0].value == "${BASE} AS runtime"
    assert '--device "${BASE%-rollout}"' in " ".join(select_values(instructions, "RUN"))
    assert stages["gpu"][0].value == stages["cpu"][0].value.replace("AS cpu", "AS gpu")
    assert not any("NVIDIA_VISIBLE_DEVICES" in value for value in select_values(stages["gpu"], "ENV")), (
        "a container must get no GPU that it did not ask for"
    )


@pytest.mark.parametrize("image", GPU_SERVICES)
def test_a_base_that_brings_torch_brings_the_version_of_the_lock(image: str) -> None:
    lock = (tools.HOMES[image] / "requirements.lock").read_text()
    locked = dict(re.findall(r"(?m)^(torch|vllm)[\w-]*==([\d.]+)", lock))
    package = "vllm" if image == "rollout" else "torch"
    [base] = [
        value.partition("=")[2]
        for value in select_values(read_instructions(), "ARG")
        if value.startswith(f"{package.upper()}_IMAGE=")
    ]
    assert re.search(r":v?([\d.]+)", base)[1] == locked[package], f"{base} is not the lock's {package}"


@pytest.mark.parametrize("name", ["defaults", "gpu-small", "gpu-large"])
def test_the_chart_uses_images_that_exist_and_their_commands(name: str) -> None:
    for pod in (pod for item in render(name) for _, pod in list_pods(item)):
        for container, _ in list_containers(pod["spec"]):
            match = re.fullmatch(rf"forage/(\w+):{re.escape(VERSION)}(-gpu)?", container["image"])
            if match is None:
                assert not container["image"].startswith("forage/"), container["image"]
                continue
            image, gpu = match.groups()
            assert image in (GPU_SERVICES if gpu else SERVICES), container["image"]
            if container["name"] == image:
                [entrypoint] = select_values(read_final_stages(image), "ENTRYPOINT")
                module = json.loads(entrypoint)[-1]
                assert {"python", module} <= set(container["command"]), container["command"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"SERVICES": "reward judge"},
            "SERVICES contains judge, expected some of: cli console retriever reward rollout trainer",
        ),
        ({"SERVICES": "reward", "GPU": "1"}, "reward has no GPU image, expected some of: retriever rollout trainer"),
        ({"GPU": "2"}, "GPU is '2', expected 1 or base"),
        ({"GPU": "1", "GPU_IMAGE": "torch:1"}, "GPU_IMAGE is a base of GPU=base, and GPU is '1'"),
        ({"PATH": "tools"}, "docker is missing: install Docker"),
        ({"DOCKER_HOST": "unix:///nowhere.sock"}, "no Docker engine answers"),
    ],
)
def test_the_script_reports_what_is_wrong(tmp_path: Path, environment: dict[str, str], message: str) -> None:
    if "DOCKER_HOST" in environment and shutil.which("docker") is None:
        pytest.skip("docker is missing")
    if "PATH" in environment:
        for tool in ("bash", "dirname", "sed", "grep"):
            (tmp_path / tool).symlink_to(str(shutil.which(tool)))
        environment = {"PATH": str(tmp_path)}
    ended = subprocess.run(["bash", SCRIPT], env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr


REGISTRY = "forage-tests"
"""Prefix of the images that the tests build, so that they replace no other image."""
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


def run_docker(*arguments: str) -> str:
    ended = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, f"docker {' '.join(arguments)}: {ended.stdout}{ended.stderr}"
    return (ended.stdout + ended.stderr).strip()


@pytest.fixture(scope="module")
def built() -> None:
    """Images forage/cli, forage/console and forage/reward of the working tree, built by scripts/images.sh."""
    if os.environ.get("FORAGE_DOCKER_TESTS") != "1":
        pytest.skip("builds images: set FORAGE_DOCKER_TESTS=1 where a Docker engine runs")
    environment = os.environ | {"SERVICES": "cli console reward", "REGISTRY": REGISTRY}
    ended = subprocess.run([SCRIPT, "--network", "host"], env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.fixture
def reward(built: None) -> Iterator[str]:
    name = run_docker("run", "--detach", *HARDENED, f"{REGISTRY}/forage/reward:{VERSION}")
    yield name
    run_docker("rm", "--force", name)


@pytest.fixture
def console(built: None, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "token").write_text("token-of-the-test")
    (tmp_path / "runs").mkdir()
    tmp_path.chmod(0o755)
    name = run_docker(
        "run", "--detach", *HARDENED, "--volume", f"{tmp_path}:/mounted:ro", f"{REGISTRY}/forage/console:{VERSION}",
        "console.auth_token_file=/mounted/token", "run.dir=/mounted/runs",
    )  # fmt: skip
    yield name
    run_docker("rm", "--force", name)


_READ_PAGES = """
import json, re, urllib.error, urllib.request

def read(path, **headers):
    try:
        return urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:18650{path}", headers=headers))
    except urllib.error.HTTPError as error:
        return error

token = {"Authorization": "Bearer token-of-the-test"}
index = read("/", **token)
[style] = re.findall(r'href="(/assets/[^"]+[.]css)"', index.read().decode())
runs = json.load(read("/api/runs", **token))["runs"]
print(read("/").status, index.status, read(style, **token).headers.get_content_type(), runs)
"""


def wait_until_healthy(container: str) -> None:
    command = ("inspect", "--format", "{{.State.Health.Status}}", container)
    wait_until(lambda: run_docker(*command) == "healthy", lambda: run_docker("logs", container))


def test_the_command_writes_the_world_on_a_read_only_file_system(built: None) -> None:
    image = f"{REGISTRY}/forage/cli:{VERSION}"
    script = "forage data world --out /tmp/world; ls /tmp/world"
    assert "manifest.json" in run_docker("run", "--rm", *HARDENED, "--entrypoint", "sh", image, "-ec", script)
    assert "uid=10001 gid=10001" in run_docker("run", "--rm", "--entrypoint", "id", image)
    tools = run_docker(
        "run", "--rm", "--entrypoint", "sh", image, "-c", "command -v gcc cc make uv mypy ruff || echo none"
    )
    assert tools == "none"


def test_the_reward_becomes_healthy_and_drains_on_stop(reward: str) -> None:
    wait_until_healthy(reward)
    run_docker("stop", "--time", "30", reward)
    assert run_docker("inspect", "--format", "{{.State.ExitCode}}", reward) == "0"
    assert '"event": "draining"' in run_docker("logs", reward)


def test_the_console_shows_its_pages_behind_its_token_and_ends_on_stop(console: str) -> None:
    wait_until_healthy(console)
    assert run_docker("exec", console, "python", "-c", _READ_PAGES).split() == ["401", "200", "text/css", "[]"]
    run_docker("stop", "--time", "30", console)
    assert run_docker("inspect", "--format", "{{.State.ExitCode}}", console) == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*HARDENED, "IMAGE"], "console.auth_token_file is not set"),
        (["--read-only", "IMAGE", "console.http_address=127.0.0.1:18650"], "docker run --tmpfs /tmp"),
    ],
)
def test_the_console_says_what_a_container_lacks(built: None, arguments: list[str], message: str) -> None:
    image = f"{REGISTRY}/forage/console:{VERSION}"
    command = ["docker", "run", "--rm", *(image if argument == "IMAGE" else argument for argument in arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr


def test_labels_are_those_of_this_checkout(built: None) -> None:
    labels = json.loads(
        run_docker("inspect", "--format", "{{json .Config.Labels}}", f"{REGISTRY}/forage/reward:{VERSION}")
    )
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.revision"] == head.stdout.strip()
