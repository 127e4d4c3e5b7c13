"""Processes that torchrun starts: rank 0's exit code is that of the whole, and SIGTERM leaves time to save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

LAUNCH = ["-m", "forage_trainer.launch.torchrun", "--standalone", "--nproc-per-node=2"]
RANK = Path(__file__).parents[2] / "support/torchrun_rank.py"
LIMIT_S = 120.0


def _start(folder: Path, *command: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *LAUNCH, *options, *command]
    with (folder / "log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(line, stdout=log, stderr=log, text=True, env=environment)


@pytest.mark.parametrize(("actions", "expected"), [(("0=3", "1=wait"), 3), (("0=wait", "1=1"), 1)])
def test_the_exit_code_is_that_of_rank_0(actions: tuple[str, ...], expected: int, tmp_path: Path) -> None:
    """Where rank 0 was only stopped, that of the rank that failed."""
    assert _start(tmp_path, str(RANK), str(tmp_path), *actions).wait(LIMIT_S) == expected, (
        tmp_path / "log"
    ).read_text()


@pytest.mark.parametrize(("seconds", "saves"), [(1, False), (60, True)])
def test_rank_0_has_the_shutdown_time_to_save_what_it_has(seconds: int, saves: bool, tmp_path: Path) -> None:
    options = (f"--shutdown-timeout={seconds}",)
    process = _start(tmp_path, str(RANK), str(tmp_path), "0=save 4", "1=wait", options=options)
    wait_until(
        lambda: all((tmp_path / f"{rank}-waits").exists() for rank in range(2)), (tmp_path / "log").read_text, LIMIT_S
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert (tmp_path / "0-saved").exists() is saves
