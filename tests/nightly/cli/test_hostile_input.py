"""Whatever every option and argument of every command is given, it ends with a sentence, never with a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_cli import COMMANDS, CONFIGS, Run, fill, run

__all__ = ["run"]


@pytest.mark.parametrize("name", ["settings.yaml", "metrics.jsonl", "state.json", "ledger.jsonl"])
@pytest.mark.parametrize("kind", ["a folder", "not UTF-8", "UTF-16", "a deep list", "many digits", "a list", "nothing"])
def test_a_run_folder_with_any_file(run: Run, tmp_path: Path, name: str, kind: str) -> None:
    content = CONFIGS.get(kind)
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "settings.yaml").write_text("model: {path: x}\n")
    (folder / "trajectories/step-1.parquet").write_bytes(b"PAR1 no PAR1")
    with contextlib.suppress(FileNotFoundError):
        (folder / name).unlink()
    if content is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(content)
    for command in (
        ["trajectories"],
        ["trajectories", "--step", "1"],
        ["check-history"],
        ["compare-runs", str(folder)],
    ):
        run(*command[:1], str(folder), *command[1:])


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS.keys())
def test_what_no_command_can_start_with(run: Run, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    if run("config", "show", "--config", str(file))[0] == 2:
        for path in (("ask",), ("config", "check")):
            assert run(*fill(path, "x"), "--config", str(file))[0] in (1, 2), path


HOSTILE = {
    "markup, escapes, and no UTF-8": "[/x]\x1b[31m\x1b[2Ja\udcffb",
    "many digits": "9" * 5000,
    "a folder": "folder",
}


class _WorkBeganError(BaseException):
    """A command took the value, and began what a test does not wait for."""


@contextlib.contextmanager
def no_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, no connection and no wait; what computes for half a second has taken its arguments."""

    def begin(*_: object, **__: object) -> None:
        raise _WorkBeganError

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    def end(_: int, frame: Any) -> None:
        while frame is not None:
            if "importlib" in frame.f_code.co_filename:  # a module that is half imported fails all later tests
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                return
            frame = frame.f_back
        raise _WorkBeganError

    before = signal.signal(signal.SIGALRM, end)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", begin)
        patch.setattr(os, "execv", begin)
        patch.setattr(os, "execve", begin)
        patch.setattr(time, "sleep", begin)
        patch.setattr(socket.socket, "connect", refuse)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            yield
        except _WorkBeganError:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def list_values(path: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """(what, command line) for each option and each argument of a command, with each hostile value."""
    for parameter in COMMANDS[path].params:
        if parameter.param_type_name == "argument":
            for name, value in HOSTILE.items():
                yield f"{parameter.name}: {name}", [*path, "--", value]
        elif not getattr(parameter, "is_flag", False) and parameter.opts[0] != "--help":
            for name, value in HOSTILE.items():
                yield f"{parameter.opts[0]}: {name}", [*fill(path, "x"), f"{parameter.opts[0]}={value}"]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_and_argument_of_every_command_with_any_value(
    run: Run, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]
) -> None:
    for what, words in list_values(path):
        with no_work(monkeypatch):
            try:
                run(*words)
            except (AssertionError, pytest.fail.Exception) as error:
                raise AssertionError(f"forage {' '.join(path)} {what}: {error!s:.3000}") from error
