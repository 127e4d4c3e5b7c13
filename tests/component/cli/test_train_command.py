"""`forage train`: the run keeps its id; what exists, runs already or is missing is an error with its remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forage_cli.local.processes import Service, Supervisor
from forage_cli.local.stack import RECORD
from forage_cli.local.training.load import check_not_in_use, load_resumed_settings, load_train_settings
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings, load_settings

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "my.yaml"
    file.write_text(f"run: {{id: mine, dir: {tmp_path}/runs}}\n")
    return file


def write_run(settings: Settings) -> None:
    settings.run.folder.mkdir(parents=True)
    (settings.run.folder / "settings.yaml").write_text(settings.to_yaml())


def test_a_run_keeps_the_id_of_its_settings(recipe: Path) -> None:
    settings = load_train_settings(recipe, ["run.seed=3"], 21000, resume=False)
    assert (settings.run.id, settings.run.seed) == ("mine", 3)
    assert settings.redis.url == "redis://127.0.0.1:21000/0"
    assert load_train_settings(recipe, ["run.id=other"], None, resume=False).run.id == "other"


def test_an_id_that_has_a_run_is_an_error_without_resume(recipe: Path) -> None:
    write_run(load_train_settings(recipe, [], None, resume=False))
    with pytest.raises(UserError, match=r"mine has a run already: continue it with --resume, or .* run.id=NAME"):
        load_train_settings(recipe, [], None, resume=False)
    more = load_train_settings(recipe, ["trainer.total_training_steps=7"], None, resume=True)
    assert (more.run.id, more.trainer.total_training_steps) == ("mine", 7)


def test_resuming_a_run_that_does_not_exist_is_an_error(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"there is no run mine to resume in .*: start it without --resume"):
        load_train_settings(recipe, [], None, resume=True)


def test_without_a_file_the_latest_run_or_the_named_one_is_resumed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name, seed in (("first", 1), ("second", 2)):
        write_run(load_settings(None, [f"run.id={name}", f"run.dir={runs}", f"run.seed={seed}"]))
    (runs / "latest").symlink_to("second")
    latest = load_train_settings(None, [f"run.dir={runs}"], None, resume=True)
    assert (latest.run.id, latest.run.seed) == ("second", 2)
    named = load_resumed_settings([f"run.dir={runs}", "run.id=first"])
    assert (named.run.id, named.run.seed) == ("first", 1)
    with pytest.raises(UserError, match="there is no run third to resume"):
        load_resumed_settings([f"run.dir={runs}", "run.id=third"])


def test_neither_a_file_nor_a_run_to_resume_is_an_error() -> None:
    with pytest.raises(UserError, match="give the settings of the run: forage train -c FILE"):
        load_train_settings(None, [], None, resume=False)


def test_a_run_that_another_command_runs_is_an_error(recipe: Path) -> None:
    settings = load_train_settings(recipe, [], None, resume=False)
    write_run(settings)
    supervisor = Supervisor(settings.run.folder / RECORD)
    supervisor.start(Service("trainer", [sys.executable, "-c", "import time; time.sleep(60)"], recipe.parent / "log"))
    try:
        for check in (
            lambda: check_not_in_use(settings),
            lambda: load_train_settings(recipe, [], None, resume=False),
        ):
            with pytest.raises(UserError, match=f"the run mine is in use: process {os.getpid()} runs its services"):
                check()
    finally:
        supervisor.stop()
    check_not_in_use(settings)


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_detached_training_that_cannot_start_says_why_and_leaves_nothing(
    tmp_path: Path, repository: Path, recipe: Path, command: str, free_base_port: Callable[[], int]
) -> None:
    ports = ["--base-port", str(free_base_port())]
    arguments = [*FORAGE, command, "-c", str(recipe), "--detach", *ports, "model.path=nowhere"]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, cwd=repository)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "nowhere" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.glob("runs/*")] == []
