"""The images: what the Dockerfile must and must not have, and with FORAGE_DOCKER_TESTS=1 two of them built and run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from deployment_tools import REPOSITORY, hadolint
from helm_chart import CHART, containers, pods, rendered

from forage_common.settings import Settings

SERVICES = ("cli", "reward", "retriever", "rollout", "trainer")
"""Images, each named like its folder below services/."""
ON_GPUS = ("retriever", "rollout", "trainer")
OWNER = "10001:10001"
SCRIPT = REPOSITORY / "scripts/images.sh"
DOCKERFILE = REPOSITORY / "services/Dockerfile"
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]


class Instruction(NamedTuple):
    """One of a Dockerfile, its continued lines in one."""

    name: str
    value: str


def instructions() -> list[Instruction]:
    """Of the whole Dockerfile."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [Instruction(*re.split(r"\s+", line, maxsplit=1)) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, list[Instruction]]:
    """Stage → its instructions, FROM first."""
    found: dict[str, list[Instruction]] = {}
    stage = ""
    for one in instructions():
        if one.name == "FROM":
            stage = one.value.partition(" AS ")[2]
        found.setdefault(stage, []).append(one)
    return found


def final_stage(image: str) -> list[Instruction]:
    """What is added to the base: the stage that all images share, then the image's own."""
    assert stages()[image][0].value == f"runtime AS {image}"
    return [*stages()["runtime"], *stages()[image]]


def values(found: list[Instruction], name: str) -> list[str]:
    return [one.value for one in found if one.name == name]


def environment(image: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for text in values(final_stage(image), "ENV") for entry in text.split())


every_image = pytest.mark.parametrize("image", SERVICES)


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([hadolint(), "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bases_are_arguments_of_a_pinned_version() -> None:
    found = instructions()
    arguments = dict(value.split("=", 1) for value in values(found, "ARG") if "=" in value)
    known: set[str] = set()
    for source in values(found, "FROM"):
        base, _, stage = source.partition(" AS ")
        if base not in known:
            argument = re.fullmatch(r"\$\{(\w+)\}", base)
            assert argument, f"FROM {base} is neither a stage nor an ARG"
            default = arguments[argument[1]]
            assert default in known or re.fullmatch(r"[a-z/-]+:v?\d+\.\d+[\w.-]*", default), default
        known.add(stage)
    assert set(SERVICES) < known


@every_image
def test_it_is_built_in_one_stage_and_runs_in_another(image: str) -> None:
    final = final_stage(image)
    assert not values(final, "RUN"), "the last layers are copied, nothing is installed in them"
    assert all("build" not in value or value.startswith("--from=build") for value in values(final, "COPY"))


def test_it_needs_neither_a_registry_nor_a_new_builder() -> None:
    text = DOCKERFILE.read_text()
    names = [one.name for one in instructions()]
    assert "ADD" not in names, "ADD fetches and unpacks: COPY says what it does"
    for refused in ("# syntax", "<<", "--link", ":latest", "https://"):
        assert refused not in text, refused


@every_image
def test_it_is_nobody_in_particular(image: str) -> None:
    assert values(final_stage(image), "USER") == [OWNER]
    names = [one.name for one in final_stage(image)]
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_what_was_locked_is_installed_and_nothing_else() -> None:
    found = stages()["build"]
    [run] = [value for value in values(found, "RUN") if "setup.sh" in value]
    assert "--production" in run
    assert run.split()[-1] == '"$SERVICE"'
    assert any("services/${SERVICE}/requirements.lock" in value for value in values(found, "COPY"))
    installs = re.findall(r"pip install.*", (REPOSITORY / "scripts/setup.sh").read_text())
    assert all("--no-deps" in line or "uv==" in line for line in installs), installs


@every_image
def test_what_it_copies_is_there_and_goes_to_the_builder(image: str) -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in lines if line.startswith("!")]
    for value in values([*stages()["build"], *final_stage(image)], "COPY"):
        if value.startswith("--from="):
            continue
        for source in value.replace("${SERVICE}", image).split()[:-1]:
            assert (REPOSITORY / source).exists(), source
            below = (
                [REPOSITORY / source] if (REPOSITORY / source).is_file() else sorted((REPOSITORY / source).iterdir())
            )
            kept = [path for path in below if any(path.is_relative_to(REPOSITORY / entry) for entry in sent)]
            assert kept, f".dockerignore leaves nothing of {source}"


@every_image
def test_processes_are_signalled_themselves(image: str) -> None:
    final = final_stage(image)
    for name in ("ENTRYPOINT", "CMD"):
        for value in values(final, name):
            assert all(isinstance(word, str) for word in json.loads(value)), f"{name} {value} goes by a shell"
    assert values(final, "STOPSIGNAL") == []


@every_image
def test_labels_say_what_it_is(image: str) -> None:
    text = " ".join(values(final_stage(image), "LABEL"))
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', text))
    assert labels["title"] == "forage/${SERVICE}"
    assert labels["description"]
    assert labels["licenses"] == "Apache-2.0"
    for label in ("version", "revision", "created"):
        assert labels[label] == f"${{{label.upper()}}}"
        assert any(value.startswith(f"{label.upper()}=") for value in values(final_stage(image), "ARG"))


@every_image
def test_health_is_asked_where_the_service_listens(image: str) -> None:
    [check] = values(final_stage(image), "HEALTHCHECK")
    if image == "cli":
        assert check == "NONE"
        return
    command = json.loads(check.partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    [variable] = re.findall(r"FORAGE__\w+", command[2])
    assert variable in environment(image)


@pytest.mark.parametrize("image", [image for image in SERVICES if image != "cli"])
def test_a_service_listens_on_every_address_at_its_own_ports(image: str) -> None:
    own = getattr(Settings(), image).model_dump()
    expected = {
        f"FORAGE__{image.upper()}__{name.upper()}": f"0.0.0.0:{address.rpartition(':')[2]}"
        for name, address in own.items()
        if re.fullmatch(r"(grpc|http|health)_address", name)
    }
    assert {name: value for name, value in environment(image).items() if name.startswith("FORAGE__")} == expected
    [ports] = values(final_stage(image), "EXPOSE")
    assert sorted(ports.split()) == sorted(value.rpartition(":")[2] for value in expected.values())


@pytest.mark.parametrize("image", ON_GPUS)
def test_a_gpu_build_is_the_same_file_on_another_base(image: str) -> None:
    found = instructions()
    assert "BASE=cpu" in values(found, "ARG")
    assert stages()["build"][0].value == "${BASE} AS build"
    assert stages()["runtime"][0].value == "${BASE} AS runtime"
    assert '--device "${BASE%%-*}"' in " ".join(values(found, "RUN"))
    lock = (REPOSITORY / "services" / image / "requirements.lock").read_text()
    locked = dict(re.findall(r"(?m)^(torch|vllm)[\w-]*==([\d.]+)", lock))
    package = "vllm" if image == "rollout" else "torch"
    [base] = [
        value.partition("=")[2] for value in values(found, "ARG") if value.startswith(f"{package.upper()}_IMAGE=")
    ]
    assert re.search(r":v?([\d.]+)", base)[1] == locked[package], f"{base} is not the lock's {package}"


@pytest.mark.parametrize("name", ["defaults", "gpu-small", "gpu-large"])
def test_the_chart_names_images_that_are_built_and_runs_what_they_run(name: str) -> None:
    for pod in (pod for thing in rendered(name) for _, pod in pods(thing)):
        for container, _ in containers(pod["spec"]):
            found = re.fullmatch(rf"forage/(\w+):{re.escape(VERSION)}(-gpu)?", container["image"])
            if found is None:
                assert not container["image"].startswith("forage/"), container["image"]
                continue
            image, gpu = found.groups()
            assert image in (ON_GPUS if gpu else SERVICES), container["image"]
            if container["name"] == image:
                [entrypoint] = values(final_stage(image), "ENTRYPOINT")
                module = json.loads(entrypoint)[-1]
                assert {"python", module} <= set(container["command"]), container["command"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"SERVICES": "reward judge"},
            "SERVICES contains judge, expected some of: cli reward retriever rollout trainer",
        ),
        ({"SERVICES": "reward", "GPU": "1"}, "reward has no GPU image, expected some of: retriever rollout trainer"),
        ({"PATH": "tools"}, "docker is missing: install Docker"),
        ({"DOCKER_HOST": "unix:///nowhere.sock"}, "no Docker engine answers"),
    ],
)
def test_the_script_says_what_is_wrong(tmp_path: Path, asked: dict[str, str], said: str) -> None:
    if "DOCKER_HOST" in asked and shutil.which("docker") is None:
        pytest.skip("no docker here")
    if "PATH" in asked:
        for tool in ("bash", "dirname", "sed", "grep"):
            (tmp_path / tool).symlink_to(str(shutil.which(tool)))
        asked = {"PATH": str(tmp_path)}
    done = subprocess.run(["bash", SCRIPT], env=os.environ | asked, capture_output=True, text=True, timeout=60)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


REGISTRY = "forage-tests"
"""Before the names of what is built here: images in use keep theirs."""
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return (done.stdout + done.stderr).strip()


@pytest.fixture(scope="module")
def built() -> None:
    """forage/cli and forage/reward of the working tree, by scripts/images.sh."""
    if os.environ.get("FORAGE_DOCKER_TESTS") != "1":
        pytest.skip("builds images: FORAGE_DOCKER_TESTS=1 where a Docker engine runs")
    environment = os.environ | {"SERVICES": "cli reward", "REGISTRY": REGISTRY}
    done = subprocess.run([SCRIPT, "--network", "host"], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def reward(built: None) -> Iterator[str]:
    name = docker("run", "--detach", *HARDENED, f"{REGISTRY}/forage/reward:{VERSION}")
    yield name
    docker("rm", "--force", name)


@pytest.mark.timeout(1200)
def test_the_command_makes_the_world_where_nothing_else_can_be_written(built: None) -> None:
    image = f"{REGISTRY}/forage/cli:{VERSION}"
    made = "forage data world --out /tmp/world; ls /tmp/world"
    assert "manifest.json" in docker("run", "--rm", *HARDENED, "--entrypoint", "sh", image, "-ec", made)
    assert "uid=10001 gid=10001" in docker("run", "--rm", "--entrypoint", "id", image)
    tools = docker("run", "--rm", "--entrypoint", "sh", image, "-c", "command -v gcc cc make uv mypy ruff || echo none")
    assert tools == "none"


@pytest.mark.timeout(1200)
def test_the_reward_becomes_healthy_and_drains_when_it_is_stopped(reward: str) -> None:
    deadline = time.monotonic() + 60
    while (state := docker("inspect", "--format", "{{.State.Health.Status}}", reward)) != "healthy":
        assert time.monotonic() < deadline, f"{state}: {docker('logs', reward)}"
        time.sleep(1)
    docker("stop", "--time", "30", reward)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", reward) == "0"
    assert '"event": "draining"' in docker("logs", reward)


def test_labels_are_those_of_this_checkout(built: None) -> None:
    labels = json.loads(docker("inspect", "--format", "{{json .Config.Labels}}", f"{REGISTRY}/forage/reward:{VERSION}"))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.revision"] == head.stdout.strip()
