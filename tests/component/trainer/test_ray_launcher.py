"""A Ray cluster that is not there, and a Ray of the trainer's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from long_folder import make_long_folder

from forage_runtime.errors import UserError
from forage_runtime.settings import load_settings
from forage_trainer.__main__ import main


def test_an_address_without_ray_is_refused(monkeypatch: pytest.MonkeyPatch, free_address: Callable[[], str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    address = free_address()
    with pytest.raises(UserError, match=f"trainer.ray.address {address} cannot be joined .*Connection refused"):
        main(load_settings(None, [f"trainer.ray.address={address}"], {}))


def test_ray_starts_where_the_folder_of_temporary_files_has_a_long_path(tmp_path: Path) -> None:
    script = (
        "from forage_runtime.settings import load_settings\n"
        "from forage_trainer.launch.ray_launcher import _connect\n"
        "import sys\n"
        "assert 'ray' not in sys.modules, 'Ray reads its environment when it is imported, and that is set later'\n"
        "with _connect(load_settings(None, [], {}).trainer):\n"
        "    import ray\n"
        "    print(ray.is_initialized())\n"
    )
    environment = os.environ | {"TMPDIR": make_long_folder(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
