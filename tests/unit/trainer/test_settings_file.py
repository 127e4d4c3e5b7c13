"""The settings that the trainer leaves in the folder of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from forage_runtime.settings import Settings, load_settings
from forage_trainer.reporting.settings_file import write_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(None, [f"run.dir={tmp_path}", "run.id=one", "trainer.total_training_steps=7"])


def test_settings_are_written_and_read_back(settings: Settings) -> None:
    write_settings(settings)
    assert load_settings(settings.run.folder / "settings.yaml", []) == settings


def test_passwords_are_left_out(tmp_path: Path) -> None:
    url = "redis://someone:secret-word@redis.example:6379/0"
    settings = load_settings(None, [f"run.dir={tmp_path}", f"redis.url={url}"])
    write_settings(settings)
    text = (settings.run.folder / "settings.yaml").read_text()
    assert "secret-word" not in text
    assert "redis://***@redis.example:6379/0" in text


def test_settings_of_a_later_start_replace_those_of_an_earlier_one(settings: Settings, tmp_path: Path) -> None:
    write_settings(settings)
    later = load_settings(None, [f"run.dir={tmp_path}", "run.id=one", "trainer.total_training_steps=9"])
    write_settings(later)
    assert load_settings(settings.run.folder / "settings.yaml", []).trainer.total_training_steps == 9


def test_the_file_of_a_command_stays(settings: Settings) -> None:
    settings.run.folder.mkdir()
    file = settings.run.folder / "settings.yaml"
    file.write_text("run: {seed: 3}\n")
    write_settings(settings)
    assert file.read_text() == "run: {seed: 3}\n"


def test_a_folder_that_cannot_be_written_is_only_logged(settings: Settings) -> None:
    settings.run.dir.joinpath("one").write_text("a file where the folder should be")
    with capture_logs() as logs:
        write_settings(settings)
    assert [entry["event"] for entry in logs] == ["settings_not_written"]
