"""Code of the user's own is loaded by one function, with sentences that name what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_runtime.user_code import UserCodeError, load_object

LOG = "from pathlib import Path\nwith (Path(__file__).parent / 'log').open('a', encoding='utf-8') as f: f.write('x')\n"


def test_a_file_runs_once_a_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{LOG}def f(): return 1\ndef g(): return f")
    assert load_object(f"{file}:f") is load_object(f"{file}:g")()
    assert (tmp_path / "log").read_text() == "x"


def test_a_file_that_raised_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("1 / 0")
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        load_object(f"{file}:x")
    file.write_text("x = 1 + 2")  # of another length: Python would take the code compiled a moment ago
    assert load_object(f"{file}:x") == 3


def test_a_dataclass_may_have_annotations_that_are_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Facts:\n    n: int"
    )
    assert load_object(f"{file}:Facts")(3).n == 3


def test_a_module_is_found_by_its_name() -> None:
    assert load_object("os.path:join")("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("raise ValueError('no such table')", "cannot be loaded (ValueError: no such table): correct it"),
        ("import sys; sys.exit(3)", "cannot be loaded (SystemExit: 3): correct it"),
        ("def f(:", "cannot be loaded (SyntaxError: "),
        ("def other(): pass", "has no 'f': define it, or name another"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, code: str, sentence: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(UserCodeError) as caught:
        load_object(f"{file}:f")
    assert str(caught.value).startswith(f"'{file}:f' cannot be loaded")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("/nowhere/mine.py:f", "'/nowhere/mine.py' is not a Python file: expected an existing .py file"),
        ("nowhere.py:f", "'nowhere.py' is not a Python file in /"),
        ("no_such_module:f", "'no_such_module:f' cannot be loaded (ModuleNotFoundError: "),
        ("json", "'json' names no code: expected FILE.py:NAME or MODULE:NAME"),
        (":f", "':f' names no code"),
        ("mine.py:", "'mine.py:' names no code"),
    ],
)
def test_a_place_without_code_is_named(source: str, sentence: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        load_object(source)
    assert str(caught.value).startswith(sentence)
