"""YAML by the core schema of YAML 1.2."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forage_runtime.errors import SettingsError
from forage_runtime.settings import load_settings
from forage_runtime.text.yaml_core import CoreDumper, CoreLoader

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")))
    | st.from_regex(r"[-+]?[0-9._oxeE:]{1,8}", fullmatch=True)
    | st.sampled_from(["on", "off", "yes", "no", "null", "~", "true", "1e-3", "0o17", "1_000", "12:30:45", "<<", "="])
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-1E5", -1e5),
        (".5", 0.5),
        ("3.", 3.0),
        ("0o17", 15),
        ("0x1F", 31),
        ("012", 12),
        ("-7", -7),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("0b11", "0b11"),
        ("2026-01-02", "2026-01-02"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("True", True),
        ("false", False),
        ("~", None),
        ("", None),
        ("-.inf", float("-inf")),
    ],
)
def test_scalar_is_read_by_the_core_schema(text: str, value: Any) -> None:
    read = yaml.load(f"key: {text}", CoreLoader)["key"]
    assert (type(read), read) == (type(value), value)


@given(st.lists(_SCALARS))
def test_what_is_dumped_is_read_back_the_same(values: list[Any]) -> None:
    read = yaml.load(yaml.dump(values, Dumper=CoreDumper), CoreLoader)
    assert [(type(value), value) for value in read] == [(type(value), value) for value in values]


def test_shipped_recipes_read_as_before() -> None:
    files = sorted(Path("configs").rglob("*.yaml"))
    assert files
    for file in files:
        content = file.read_text(encoding="utf-8")
        core, old = yaml.load(content, CoreLoader), yaml.safe_load(content)
        assert repr(core) == repr(old), file


def test_key_that_stands_twice_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("run:\n  seed: 1\n  id: a\n  seed: 2\n")
    with pytest.raises(SettingsError, match=r"line 4.*'seed' stands twice"):
        load_settings(file, environ={})


def test_file_override_and_environment_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {actor: {optim: {lr: 1e-3}}}\nrun: {id: on}\n")
    from_file = load_settings(file, environ={})
    assert from_file.run.id == "on"
    assert from_file == load_settings(overrides=["trainer.actor.optim.lr=1e-3", "run.id=on"], environ={})
    assert from_file == load_settings(environ={"FORAGE__TRAINER__ACTOR__OPTIM__LR": "1e-3", "FORAGE__RUN__ID": "on"})


@pytest.mark.parametrize("text", ["1355700", "0123", "2026-01-02", "on", "1e3", "0x1F", "true", "3.10", "1_000"])
def test_a_setting_that_is_a_text_takes_the_text(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: &run {{id: {text}}}\n", encoding="utf-8")
    assert load_settings(file, environ={}).run.id == text
    assert load_settings(overrides=[f"run.id={text}"], environ={}).run.id == text
    again = tmp_path / "again.yaml"
    again.write_text(load_settings(file, environ={}).to_yaml(), encoding="utf-8")
    assert load_settings(again, environ={}).run.id == text


def test_a_text_that_is_no_scalar_is_still_an_error() -> None:
    with pytest.raises(SettingsError, match=r"setting 'run.id' is \['a'\]"):
        load_settings(overrides=["run.id=[a]"], environ={})


def test_every_wrong_setting_has_a_line() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(overrides=["run.sed=1", "trainer.max_staleness=x", "rollout.n=0"], environ={})
    lines = str(caught.value).split("\n")
    assert {line.split("'")[1] for line in lines} == {"run.sed", "rollout.n", "trainer.max_staleness"}
