"""Hostile settings files, and the `forage` command in this process, which may end with a sentence only."""

from __future__ import annotations

import sys
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
    "a deep list": b"run: " + b"[" * 2_000,
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
