"""`forage serve` runs a service in the environment of that service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()", "serve"]


def run_forage(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FORAGE, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.mark.parametrize(("service", "does"), [("retriever", "search a corpus"), ("reward", "score trajectories")])
def test_the_service_itself_answers(tmp_path: Path, service: str, does: str) -> None:
    shown = run_forage(service, "--help", cwd=tmp_path)
    assert (shown.returncode, does in shown.stdout, "key=value" in shown.stdout) == (0, True, True)
    wrong = run_forage(service, "-c", "none.yaml", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        f"forage {service}: settings file none.yaml cannot be read (No such file or directory): give an existing YAML"
        " file\n",
    )


def test_what_is_no_service_is_said(tmp_path: Path) -> None:
    wrong = run_forage("librarian", cwd=tmp_path)
    assert (wrong.returncode, "librarian" in wrong.stderr) == (2, True)
