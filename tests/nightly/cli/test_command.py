"""Services as processes: their usage, and an error of theirs that ends a demo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import WAIT_S

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]


@pytest.mark.parametrize("service", ["retriever", "reward", "rollout", "trainer"])
def test_a_service_prints_its_usage(repository: Path, service: str) -> None:
    command = [repository / f".venvs/{service}/bin/python", "-m", f"forage_{service}", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNDEFAULTENCODING"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment)  # libraries warn
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"`python -m forage_{service} [--config FILE]")
    assert "FORAGE__RUN__SEED=1" in ended.stdout


def test_an_error_found_by_a_service_ends_the_demo_and_leaves_no_run_folder(
    tmp_path: Path, repository: Path, free_base_port: Callable[[], int]
) -> None:
    options = ["--base-port", str(free_base_port()), f"run.dir={tmp_path}/runs"]
    command = [*FORAGE, "demo", *options, "reward.routes.world_facts.name=exact"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=5 * WAIT_S, cwd=repository)
    assert ended.returncode == 2
    assert "reward.routes.world_facts asks for the reward 'exact', which does not exist" in ended.stderr
    assert list((tmp_path / "runs").iterdir()) == [], "no file is left"
