"""The device of a service follows its setting and the build of PyTorch, never the GPUs that are there now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forage_runtime import devices
from forage_runtime.devices import count_cpus, find_cuda_version, resolve_device
from forage_runtime.errors import UserError


@pytest.fixture(params=["13.0", None, ""])
def torch(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of PyTorch as its wheels have it: `cuda` is a version or None; "": there is no such file."""
    if request.param != "":
        lines = ["from typing import Optional", "__version__ = '2.13.0'", f"cuda: Optional[str] = {request.param!r}"]
        (tmp_path / "version.py").write_text("\n".join(lines))
    return tmp_path


def test_the_build_decides_where_the_setting_does_not(torch: Path) -> None:
    cuda = find_cuda_version(torch)
    assert cuda in ("13.0", "")
    assert resolve_device("auto", "trainer.device", torch) is bool(cuda)
    assert resolve_device("cpu", "trainer.device", torch) is False
    if cuda:
        assert resolve_device("gpu", "trainer.device", torch) is True
    else:
        with pytest.raises(UserError, match=r"trainer.device is gpu, .* built for CPUs: .*make setup DEVICE=gpu"):
            resolve_device("gpu", "trainer.device", torch)


def write_groups(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """Control groups: the file that names those of this process, and their root."""
    for name, text in files.items():
        file = folder / "groups" / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "own").write_text(own)
    return folder / "groups", folder / "own"


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "149000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "no number"}, 64),
        ("0::/\n", {}, 64),
        ("0::/pods/one\n", {"pods__one__cpu.max": "max 100000", "pods__cpu.max": "300000 100000"}, 3),
        ("0::/pods/one\n", {"cpu.max": "300000 100000"}, 3),
        ("0::/../../other\n", {"cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/docker/a\n2:memory:/docker/a\n",
         {"cpu,cpuacct__cpu.cfs_quota_us": "600000", "cpu,cpuacct__cpu.cfs_period_us": "100000"}, 6),
        ("4:cpu:/\n", {"cpu__cpu.cfs_quota_us": "-1", "cpu__cpu.cfs_period_us": "100000"}, 64),
    ],
)  # fmt: skip
def test_cpus_are_those_of_the_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], cpus: int
) -> None:
    groups, names = write_groups(tmp_path, own, **files)
    monkeypatch.setattr(devices, "_CGROUPS", groups)
    monkeypatch.setattr(devices, "_OWN_CGROUPS", names)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert count_cpus() == cpus


def test_cpus_are_at_most_those_that_the_process_may_run_on() -> None:
    before = os.sched_getaffinity(0)
    assert 1 <= count_cpus() <= len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert count_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)
