"""What `forage doctor` says of driver and GPUs: a program in place of nvidia-smi answers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from forage_cli.commands.doctor import NEEDED_DISK_GIB, NEEDED_MEMORY_GIB, Check, check_gpus, check_proxy
from forage_cli.local import nvidia
from forage_cli.local.stack import Program

BOTH = {"rollout": "13.0", "trainer": "13.0"}
BACK = "or go back with 'make setup DEVICE=cpu'"
Driver = Callable[..., None]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Make nvidia-smi list GPUs, one line each; or answer otherwise, by a shell script."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*gpus: str, capability: str = "9.0", script: str = "") -> None:
        listed = "".join(f"  echo '{number}, GPU-{number:08x}, {gpu}'\n" for number, gpu in enumerate(gpus))
        known = "".join(f"  echo '{number}, {capability}'\n" for number in range(len(gpus)))
        script = script or f"case $* in *compute_cap*)\n{known}  ;; *)\n{listed}esac\n"
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def check(builds: dict[str, str]) -> dict[str, Check]:
    return {found.subject: found for found in check_gpus(builds)}


@pytest.mark.parametrize(
    ("builds", "value", "fix", "fatal"),
    [
        ({}, "none (no nvidia-smi): everything runs on the CPU", "", False),
        (
            BOTH,
            "none (no nvidia-smi)",
            f"CUDA 13.0 of rollout, trainer needs a GPU and NVIDIA's driver 580 or later: install it, {BACK}",
            True,
        ),
        (
            {"retriever": "13.0"},
            "none (no nvidia-smi)",
            f"CUDA 13.0 of retriever needs a GPU and NVIDIA's driver 580 or later: install it, {BACK}",
            False,
        ),
    ],
)
def test_without_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: dict[str, str], value: str, fix: str, fatal: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(check_gpus(builds)) == [Check("GPU driver", value, fix, fatal)]


def test_a_good_driver(driver: Driver) -> None:
    driver(*["NVIDIA H100 80GB HBM3, 81559, 580.65.06, Disabled"] * 2)
    found = check(BOTH)
    assert found["GPU driver"] == Check("GPU driver", "580.65.06", "", True)
    assert found["GPU 1"] == Check("GPU 1", "NVIDIA H100 80GB HBM3, 80 GiB", "", False)
    assert found.keys() == {"GPU driver", "GPU 0", "GPU 1"}


def test_a_driver_that_is_too_old(driver: Driver) -> None:
    driver("NVIDIA A100-SXM4-40GB, 40960, 550.54.15, Disabled")
    found = check(BOTH)["GPU driver"]
    assert found == Check("GPU driver", "550.54.15", f"CUDA 13 needs driver 580 or later: update it, {BACK}", True)
    assert check({"rollout": "12.9"})["GPU driver"].fix == "", "12.x runs on drivers since 525"
    unused = check({})["GPU driver"]
    assert (unused.fix, unused.fatal) == ("CUDA 13 needs driver 580 or later: update it", False)


def test_gpus_that_no_environment_uses(driver: Driver) -> None:
    driver("NVIDIA L4, 23034, 595.1, [N/A]")
    assert check({})["GPU driver"].fix == "no environment uses it: run 'make setup DEVICE=gpu'"


def test_a_divided_gpu_and_one_that_is_too_old_for_cuda(driver: Driver) -> None:
    driver("NVIDIA A100-SXM4-40GB, 40960, 580.65.06, Enabled", capability="8.0")
    found = check(BOTH)["GPU 0"]
    assert (found.value, found.fatal) == ("NVIDIA A100-SXM4-40GB, 40 GiB, divided (MIG)", False)
    assert "CUDA_VISIBLE_DEVICES=MIG-" in found.fix
    driver("Tesla V100-SXM2-16GB, 16384, 580.65.06, [N/A]", capability="7.0")
    assert check(BOTH)["GPU 0"].fix == "its compute capability is 7.0, and CUDA 13 has code for 7.5 and later"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo NVIDIA-SMI has failed because it could not talk to the driver >&2; exit 9", "nvidia-smi fails: NVIDIA"),
        ("echo No devices were found", r"no list of GPUs \(\['No devices were found'\]\)"),
        ("echo '0, GPU-1, NVIDIA GB10, [N/A], 580.95, [N/A]'", "no list of GPUs"),
        ("printf '\\000\\377\\n,,,,,\\n'", "no list of GPUs"),
        ("kill -9 $$", "nvidia-smi fails"),
    ],
)
def test_answers_that_are_no_list_of_gpus(driver: Driver, script: str, words: str) -> None:
    driver(script=script)
    [found] = check_gpus(BOTH)
    assert (found.value, found.fatal) == ("unknown", True)
    assert re.search(words, found.fix)
    [found] = check_gpus({})
    assert not found.fatal


def test_a_driver_that_does_not_know_capabilities_and_one_without_gpus(driver: Driver) -> None:
    gpu = "echo '0, GPU-1, NVIDIA T4, 15360, 580.1, [N/A]'"
    driver(script=f"case $* in *compute_cap*) exit 2;; esac; {gpu}")
    assert check(BOTH)["GPU 0"].fix == ""
    driver(script="exit 0")
    assert check(BOTH)["GPU driver"].value == "no GPU"


@pytest.mark.parametrize(("visible", "fix"), [("1", ""), ("", "no GPU is visible: unset it")])
def test_hidden_gpus_are_said(driver: Driver, monkeypatch: pytest.MonkeyPatch, visible: str, fix: str) -> None:
    driver(*["NVIDIA L4, 23034, 595.1, [N/A]"] * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = check(BOTH)["CUDA_VISIBLE_DEVICES"]
    assert (found.value, found.fix) == (repr(visible), fix)


def test_the_build_of_an_environment_is_that_of_its_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / ".venvs/trainer/bin/python"
    torch = tmp_path / ".venvs/trainer/lib/python3.11/site-packages/torch"
    torch.mkdir(parents=True)
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr("forage_cli.local.home.find_home", lambda: tmp_path)
    for written, read in (("'13.0'", "13.0"), ("None", "")):
        (torch / "version.py").write_text(f"cuda = {written}\n")
        assert nvidia.find_cuda(Program.TRAINER) == read


def test_the_locked_cuda_is_one_that_is_known() -> None:
    assert nvidia.get_major(nvidia.read_locked_cuda()) in nvidia.MINIMUM_DRIVER
    assert nvidia.MINIMUM_DRIVER.keys() == nvidia.MINIMUM_CAPABILITY.keys()


def run_doctor() -> Sequence[str]:
    ended = subprocess.run(
        [sys.executable, "-c", "from forage_cli.main import main; main()", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended.stdout.splitlines()


def test_the_command_shows_driver_gpus_and_the_build_of_each_environment(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver("NVIDIA L4, 23034, 595.1, [N/A]")
    monkeypatch.setenv("COLUMNS", "200")
    lines = run_doctor()
    assert any(re.search(r"GPU driver +595\.1", line) for line in lines)
    assert any(re.search(r"GPU 0 +NVIDIA L4, 22 GiB", line) for line in lines)
    for name in ("retriever", "rollout", "trainer"):
        assert any(re.search(rf"{name} environment .*\((CPU|GPU, CUDA [\d.]+)\)", line) for line in lines)


def test_the_variables_of_a_proxy_are_named_without_their_values() -> None:
    environ = {"https_proxy": "http://me:s3cr3t@proxy:3128", "NO_PROXY": "localhost", "PATH": "/bin"}
    (found,) = check_proxy(environ)
    assert found == Check("proxy", "NO_PROXY, https_proxy: downloads use it, calls between services do not")
    assert list(check_proxy({"PATH": "/bin"})) == []


def test_the_readme_names_the_memory_and_disk_that_the_command_asks_for(repository: Path) -> None:
    readme = " ".join((repository / "README.md").read_text(encoding="utf-8").split())
    assert f"{NEEDED_MEMORY_GIB} GiB of free memory" in readme
    assert f"and {NEEDED_DISK_GIB} GiB of disk for a run" in readme
