"""`forage reward` runs in the reward environment, which reads Parquet through the command's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from forage_runtime.errors import DataError
from forage_runtime.files.parquet_rows import json_lines

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()", "reward"]


def run_forage(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FORAGE, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    truth = {"reward_model": {"ground_truth": {"target": ["Oslo"]}}}
    answers = ("Oslo", "Rome")
    rows = [{"data_source": "nq", "response": f"<answer>{answer}</answer>", **truth} for answer in answers]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_help_and_exit_codes_come_from_the_reward_environment(tmp_path: Path) -> None:
    shown = run_forage("--help", cwd=tmp_path)
    assert "Usage: forage reward" in shown.stdout
    for command in ("list", "explain", "score"):
        assert f" {command} " in shown.stdout
    wrong = run_forage("score", "none.jsonl", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert wrong.stderr.startswith("forage: none.jsonl cannot be read")


def test_a_parquet_file_is_scored(parquet: Path) -> None:
    ended = run_forage("score", parquet.name, "--reward", "em", cwd=parquet.parent)
    assert ended.returncode == 0, ended.stderr
    lines = parquet.with_suffix(".scores").read_text().splitlines()
    assert [json.loads(line)["total"] for line in lines] == [1.0, 0.0]
    assert "nq" in ended.stdout


def test_a_file_that_is_no_parquet_ends_with_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("PAR?")
    ended = run_forage("score", "bad.parquet", "--reward", "em", cwd=tmp_path)
    assert ended.returncode == 2
    assert "bad.parquet cannot be read as Parquet" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "bad.scores").exists()


def test_rows_come_in_order_and_a_missing_file_is_named(parquet: Path) -> None:
    assert [json.loads(line)["response"] for line in json_lines(parquet)] == [
        "<answer>Oslo</answer>",
        "<answer>Rome</answer>",
    ]
    with pytest.raises(DataError, match=r"none\.parquet cannot be read"):
        list(json_lines(Path("none.parquet")))
