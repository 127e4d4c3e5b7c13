"""The `forage` command: its help, version and settings; bad input ends with one sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from forage_command import RunForage, run_forage

from forage_cli.settings_reference import describe_settings, explain_setting
from forage_runtime import __version__

__all__ = ["run_forage"]


def test_help_lists_every_command(run_forage: RunForage) -> None:
    text = run_forage("--help").stdout
    for command in ("demo", "up", "ask", "trajectories", "status", "config", "doctor", "data", "reward"):
        assert f" {command} " in text


def test_version_is_that_of_the_project(run_forage: RunForage) -> None:
    assert run_forage("--version").stdout == f"forage {__version__}\n"


def test_config_explain_prints_type_default_description_and_value(run_forage: RunForage) -> None:
    ended = run_forage("config", "explain", "trainer.max_staleness", "trainer.max_staleness=3")
    name, summary, description = ended.stdout.splitlines()[:3]
    assert name == "trainer.max_staleness = 3"
    assert summary.strip() == "integer ≥ 0, default 1"
    assert len(description) > 20


def test_config_explain_prints_every_setting_of_a_section(run_forage: RunForage) -> None:
    text = run_forage("config", "explain", "rollout.engine").stdout
    names = {line.partition(" =")[0] for line in text.splitlines() if line.startswith("rollout.")}
    assert names == {setting.name for setting in explain_setting("rollout.engine")}
    assert "rollout.engine.max_model_len" in names


@pytest.mark.parametrize("arguments", [["config", "show"], ["config", "explain", "redis.url"]])
def test_passwords_in_urls_are_not_printed(run_forage: RunForage, arguments: list[str]) -> None:
    text = run_forage(*arguments, "redis.url=redis://forage:secret-word@host:6379/0").stdout
    assert "redis://***@host:6379/0" in text
    refused = run_forage(*arguments, "redis.url=http://forage:secret-word@host")
    assert "secret-word" not in text + refused.stderr
    assert "redis.url" in refused.stderr


def test_config_show_explains_every_setting(run_forage: RunForage) -> None:
    text = run_forage("config", "show", "--explain").stdout
    assert all(f"\n{setting.name} = " in f"\n{text}" for setting in describe_settings())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["config", "check", "trainer.totl=1"], "unknown setting 'trainer.totl'"),
        (["config", "show", "-c", "none.yaml"], "none.yaml cannot be read"),
        (["config", "explain", "trainer.max_stale"], "'trainer.max_stale': did you mean 'trainer.max_staleness'?"),
        (["ask", "  "], "the question is empty: write one"),
        (["demo", "rollout.nn=1"], "unknown setting 'rollout.nn': did you mean 'rollout.n'?"),
        (["demo", "--resume"], "there is no run to resume"),
        (["trajectories", "nothing"], "nothing is not a run"),
        (["trajectories", "[bold]x[/y]"], "[bold]x[/y] is not a run"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_exit_code_2(
    run_forage: RunForage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run_forage(*arguments)
    assert ended.code == 2
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "no file is left"
