"""The device of a service follows its setting and the build of PyTorch, never the GPUs that are there now."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_common.devices import find_cuda_version, resolve_device
from forage_common.errors import UserError


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
