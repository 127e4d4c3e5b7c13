"""Which folders a request may name."""

from __future__ import annotations

from pathlib import Path

import pytest
from upath import UPath

from forage_console.context import Console
from forage_console.errors import NotFoundError
from forage_runtime.settings import Settings


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    (folder / "one").mkdir(parents=True)
    (folder / "latest").symlink_to("one")
    (tmp_path / "secret").mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / ".hidden").mkdir()
    (folder / "deep/er").mkdir(parents=True)
    (folder / "file").write_text("no folder")
    return folder


@pytest.mark.parametrize("name", ["one", "latest"])
def test_a_run_is_found_by_its_name_or_by_a_link(runs: Path, name: str) -> None:
    assert Console(UPath(runs), Settings()).find_run(name) == UPath(runs / "one")


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../secret", "../runs/one", "one/../../secret", "/etc", "deep/er", "link", ".hidden", "file"),
        *("one\0", "..\\secret", "x" * 300, "é" * 200, "nothing", "one\udcff"),
    ],
)
def test_nothing_else_is_a_run(runs: Path, name: str) -> None:
    with pytest.raises(NotFoundError, match=r"^(there is no run|run 'link' links out of)"):
        Console(UPath(runs), Settings()).find_run(name)


@pytest.mark.parametrize("name", ["metrics.jsonl", "trajectories", "validation/after.jsonl", "logs/reward.log"])
def test_a_run_with_a_link_out_of_its_folder_is_not_shown(runs: Path, name: str) -> None:
    link = runs / "one" / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(runs.parent / "secret")
    with pytest.raises(NotFoundError, match=f"run 'one' has a link out of its folder .{name}.: copy in"):
        Console(UPath(runs), Settings()).find_run("one")


def test_large_folders_of_a_run_may_lie_elsewhere(runs: Path) -> None:
    (runs / "one/checkpoints").symlink_to(runs.parent / "secret")
    (runs / "one/trajectories").mkdir()
    (runs / "one/newest").symlink_to("trajectories")
    assert Console(UPath(runs), Settings()).find_run("one") == UPath(runs / "one")


def test_runs_may_be_kept_in_an_object_store() -> None:
    runs = UPath("memory://kept/runs")
    (runs / "one").mkdir(parents=True)
    assert Console(runs, Settings()).find_run("one") == runs / "one"
    with pytest.raises(NotFoundError):
        Console(runs, Settings()).find_run("two")


def test_links_that_lead_to_each_other_hide_no_run(runs: Path) -> None:
    (runs / "one/trajectories").mkdir()
    (runs / "one/trajectories/step-000001.parquet").symlink_to("step-000001.parquet")
    assert Console(UPath(runs), Settings()).find_run("one") == UPath(runs / "one")
