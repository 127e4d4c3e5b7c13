"""`forage status` reads the settings of what runs, else of the latest run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from forage_cli.commands.status import find_settings
from forage_cli.local.stack import RECORD, shift_ports
from forage_runtime.settings import load_settings


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_run(name: str, base_port: int | None = None, runs: bool = False) -> Path:
    """A run whose supervisor is this process, or one that has ended."""
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(load_settings(None, shift_ports(base_port), {}).to_yaml())
    started = psutil.Process().create_time() if runs else 1.0
    (folder / RECORD).write_text(json.dumps({"supervisor": {"pid": os.getpid(), "started": started}, "services": []}))
    return folder / "settings.yaml"


def test_what_runs_goes_before_the_latest_run_and_a_given_file_before_both() -> None:
    assert find_settings(None, None) is None
    ended = write_run("ended")
    Path("runs/latest").symlink_to("ended")
    assert find_settings(None, None) == Path("runs/latest/settings.yaml")
    serving = write_run("local", runs=True)
    assert find_settings(None, None) == serving
    assert find_settings(ended, None) == ended


def test_ports_tell_which_of_several_is_meant() -> None:
    first, second = write_run("first", 13000, runs=True), write_run("second", 14000, runs=True)
    assert find_settings(None, 13000) == first
    assert find_settings(None, 14000) == second
    assert find_settings(None, 15000) is None
