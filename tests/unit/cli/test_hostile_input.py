"""Whatever a command is given, it ends with a sentence and exit code 0, 1 or 2, never with a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from forage_cli.commands.forwarded import NAMES
from forage_cli.main import app, main

_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)
)
CONFIGS: dict[str, bytes] = {
    "not UTF-8": b"run: {id: \xff\xfe\x00}",
    "UTF-16": "run: {id: a}".encode("utf-16"),
    "a date that is none": b"run: {id: 2024-13-45}",
    "a time that is none": b"run: {id: 2024-01-01 99:99:99}",
    "a deep list": b"run: " + b"[" * 100_000,
    "a deep map": b"run: " + b"{a: " * 3000 + b"1" + b"}" * 3000,
    "deep blocks": b"".join(b" " * n + b"a:\n" for n in range(3000)),
    "a NUL": b'run: {dir: "a\\0b"}',
    "a control": b"run: {id: \x1b[2J}",
    "a surrogate": b'run: {id: "\\ud800", dir: "\\udfff"}',
    "many digits": b"run: {seed: " + b"9" * 5000 + b"}",
    "many hexadecimal digits": b"run: {id: 0x" + b"f" * 20_000 + b"}",
    "sexagesimal": b"run: {seed: " + b"1:" * 5000 + b"1}",
    "not finite": b"rollout: {temperature: .nan}",
    "1e400": b"rollout: {temperature: 1.0e+400}",
    "one key twice": b"run: {seed: 1}\nrun: {seed: 2}",
    "a billion laughs": _LAUGHS.encode(),
    "an alias of itself": b"run: &a {id: *a}",
    "an unknown alias": b"run: *nothing",
    "a merge of a number": b"run: {<<: 3}",
    "a tag": b"run: !!python/object/apply:os.system [id]",
    "a bad integer": b"run: {seed: !!int x}",
    "a bad set": b"run: !!set [a]",
    "a key that is a list": b"? [a, [b]]\n: 1",
    "a key that is a map": b"{{a: b}: 1}",
    "a key that is a number": b"1: 2\n",
    "two documents": b"run: {seed: 1}\n---\nrun: {seed: 2}",
    "markup": b"run: {id: '[/x][bold]'}",
    "nothing": b"",
    "a list": b"[1]",
}
OVERRIDES = [
    "run.id=[/x]",
    "[/x]=1",
    "run.id=\x1b[2J",
    "run.seed=" + "9" * 5000,
    "run.seed=1e400",
    "run.seed=0x" + "f" * 10_000,
    "run.id=" + "[" * 50_000,
    "rollout.temperature=.nan",
    "rollout.temperature=-.inf",
    "run.id=2024-99-99",
    "run.id=!!timestamp x",
    "run.dir=" + "a" * 100_000,
    'model.path="a\\0b"',
    "a." * 3000 + "b=1",
    "=1",
    ".=1",
    "..=",
    "run=1",
    "run.id",
    "redis.url=redis://[::1",
    "redis.url=redis+sentinel://a:99999999999/x",
    "redis.url=redis://h:99999999",
    "data.train_files=[[[]]]",
    "reward.routes={1: {name: 2}}",
    'reward.routes.x.name="\\ud800"',
    "rollout.http_address=h:99999",
]


def list_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from list_commands(inner, (*path, name))
    elif path[0] not in NAMES | {"model"}:  # services parse theirs; a model is fetched
        yield path, command


COMMANDS = dict(list_commands(get_command(app)))
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "bad.yaml").write_bytes(b"run: {seed: wrong}")

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["forage", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = "".join(capfd.readouterr())
        assert "Traceback" not in output
        assert "\x1b[2J" not in output
        code = ended.value.code
        assert code in (0, 1, 2), (arguments, output)
        if code == 2:
            assert output.strip(), arguments
        return int(code), output

    return run


def fill(path: tuple[str, ...], value: str) -> list[str]:
    required = [one for one in COMMANDS[path].params if one.param_type_name == "argument" and one.required]
    return [*path, *[value] * len(required)]


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_settings_file_of_any_content(run: Run, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    code, _ = run("config", "show", "--config", str(file))
    if code == 2:  # what no command can start with; all of them load settings in one way
        for path in (("ask",), ("config", "check")):
            assert run(*fill(path, "x"), "--config", str(file))[0] in (1, 2), path


@pytest.mark.parametrize("override", OVERRIDES, ids=range(len(OVERRIDES)))
def test_a_setting_of_any_value(run: Run, override: str) -> None:
    code, output = run("config", "show", override)
    if code:
        assert len(output) < 2000, "an error is a sentence"


@pytest.mark.parametrize("argument", ["a\udcffb", "a\0b"])
@pytest.mark.parametrize("path", [("trajectories",), ("ask",), ("config", "show"), ("eval", "report")], ids=" ".join)
def test_an_argument_that_is_no_text(run: Run, path: tuple[str, ...], argument: str) -> None:
    code, output = run(*path, argument)
    assert code == 2
    assert "argument" in output


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


def test_a_settings_file_that_may_not_be_read(run: Run, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (tmp_path / "bad.yaml").chmod(0)
    assert run("config", "show", "--config", "bad.yaml")[0] == 2


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
