"""The texts of a run's tokens, wherever the console was started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from upath import UPath

from forage_console.details.token_columns import find_texts


def write_tokenizer(folder: Path, word: str) -> None:
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {word: 7}}}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UPath:
    """A run that was started in the folder above runs/, and a console that was not."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "project/runs/one").mkdir(parents=True)
    return UPath(tmp_path / "project/runs/one")


def test_a_relative_model_is_found_beside_the_folder_of_runs(run: UPath) -> None:
    write_tokenizer(Path(run).parent.parent / "models/tiny", "beside")
    assert find_texts(run, "models/tiny")([7]) == ["beside"]


def test_a_model_that_is_gone_is_read_from_a_published_policy(run: UPath) -> None:
    write_tokenizer(Path(run) / "policies/v3-e1", "published")
    assert find_texts(run, "models/tiny")([7]) == ["published"]
    assert find_texts(run, None)([7]) == ["published"]


def test_tokens_without_any_model_are_their_numbers(run: UPath) -> None:
    assert find_texts(run, "models/tiny")([7]) == ["<7>"]
