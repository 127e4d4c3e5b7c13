"""Two runs are compared by the digests that their steps left in metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run
from typer.testing import CliRunner

from forage_cli.main import app
from forage_records.comparison import compare_runs
from forage_records.run_folder import RunFolder
from forage_runtime.errors import DataError


def make_run(folder: Path, *digests: tuple[str, str] | None) -> RunFolder:
    """A run with (tokens, weights) digests of its steps; None is a step that a rollback skipped."""
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for step, pair in enumerate(digests, 1):
        rows.append({"step": step} if pair is None else {"step": step, "tokens_digest": pair[0]})
        rows[-1]["weights_digest"] = pair[1] if pair else "w"
    return write_run(folder, {}, rows)


def test_equal_runs_are_equal_and_the_first_difference_is_named(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", ("t1", "w1"), None, ("t3", "w3"))
    assert compare_runs(first, make_run(tmp_path / "b", ("t1", "w1"), None, ("t3", "w3"))).first_difference is None
    assert compare_runs(first, make_run(tmp_path / "c", ("t1", "w1"), None, ("t3", "wX"))).first_difference == 3
    assert compare_runs(first, make_run(tmp_path / "d", ("t1", "w1"), ("t2", "w"), ("t3", "w3"))).first_difference == 2
    shorter = compare_runs(first, make_run(tmp_path / "e", ("t1", "w1"), None))
    assert shorter.to_json() == {
        "steps": 3,
        "tokens_digests_equal": 2,
        "weights_digests_equal": 2,
        "first_difference": 3,
    }


def test_the_command_prints_a_table_and_json_and_exits_with_1_on_a_difference(tmp_path: Path) -> None:
    one, other = "a" * 64, "a" * 63 + "b"
    make_run(tmp_path / "a", (one, one))
    make_run(tmp_path / "b", (one, other))
    same = CliRunner().invoke(app, ["compare-runs", str(tmp_path / "a"), str(tmp_path / "a")])
    assert same.exit_code == 0
    assert json.loads(same.stdout.splitlines()[-1])["first_difference"] is None
    result = CliRunner().invoke(app, ["compare-runs", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 1, "a difference beyond what is shown counts"
    assert json.loads(result.stdout.splitlines()[-1])["first_difference"] == 1
    assert "differs" in result.stdout


def test_a_run_without_digests_is_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ("t", "w"))
    (tmp_path / "old").mkdir()
    with pytest.raises(DataError, match=r"old has no step with digests"):
        compare_runs(run, write_run(tmp_path / "old", {}, [{"step": 1}]))
