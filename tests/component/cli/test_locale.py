"""Commands in a locale that is not UTF-8."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ascii_locale import build_ascii_environment


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["doctor"], " ok  python"), (["config", "show", "run.id=a"], "id: a"), (["--help"], "forage")],
)
def test_a_command_prints_where_the_locale_is_not_utf_8(arguments: list[str], part: str, repository: Path) -> None:
    program = "from forage_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=repository, env=build_ascii_environment(), capture_output=True
    )
    assert b"Error" not in done.stderr, done.stderr
    assert part in done.stdout.decode("ascii")


def test_an_argument_that_the_locale_cannot_read_is_a_sentence(repository: Path) -> None:
    command = [sys.executable, "-c", "from forage_cli.main import main; main()", "config", "show", "run.id=é"]
    done = subprocess.run(command, cwd=repository, env=build_ascii_environment(), capture_output=True)
    assert done.returncode == 2
    assert "set PYTHONUTF8=1" in " ".join(done.stderr.decode("ascii").split())
