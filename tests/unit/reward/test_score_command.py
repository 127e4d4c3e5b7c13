"""`python -m forage_reward.command`, the other half of `forage reward`, as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forage_reward.registry import REWARDS

RIGHT = "<think>t</think><answer>Oslo</answer>"
ROWS = [
    {"text": RIGHT, "targets": ["Oslo"], "data_source": "world_facts"},
    {"text": "but " + RIGHT, "targets": ["Oslo"], "data_source": "world_facts"},
    {"text": RIGHT, "targets": ["Rome"]},
]


def command(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "forage_reward.command", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=cwd, input=stdin)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    file = tmp_path / "dump.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def records(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_list_names_every_reward_and_its_parameters(tmp_path: Path) -> None:
    shown = command("list", cwd=tmp_path).stdout
    for name, reward in REWARDS.items():
        assert name in shown
        assert all(f"{parameter}=" in shown for parameter in reward.params.model_fields)


def test_explain_shows_the_path_to_the_offence_and_the_rule_that_fired(tmp_path: Path) -> None:
    ended = command("explain", "--target", "Oslo", cwd=tmp_path, stdin="but " + RIGHT)
    assert ended.returncode == 0, ended.stderr
    (offence,) = [line for line in ended.stdout.splitlines() if "not allowed here" in line]
    assert offence.split("│")[1:3] == [" start ", " but   "]
    assert "right answer, invalid format: text 'but' may not come in state start" in ended.stdout
    (footer,) = [line for line in ended.stdout.splitlines() if line.startswith("│ total")]
    assert "0.8" in footer


def test_explain_shows_every_step_of_a_valid_row(tmp_path: Path) -> None:
    ended = command("explain", "-", "--reward", "em", cwd=tmp_path, stdin=json.dumps(ROWS[0]))
    steps = [line.split("│")[2].strip() for line in ended.stdout.splitlines() if line.count("│") == 4]
    assert steps[:6] == ["<think>", "t", "</think>", "<answer>", "Oslo", "</answer>"]
    assert "valid" in ended.stdout
    assert "score of em" in ended.stdout


def test_score_by_the_routes_of_the_settings(dump: Path) -> None:
    ended = command("score", str(dump), "--data-source", "world_facts", cwd=dump.parent)
    assert ended.returncode == 0, ended.stderr
    found = records(dump.with_suffix(".scores.jsonl"))
    assert [record["total"] for record in found] == pytest.approx([1.0, 0.8, 0.2])
    assert [record["validation"]["total"] for record in found] == [1.0, 1.0, 0.0]  # type: ignore[index]
    assert "3 rows in, 3 out" in ended.stdout
    assert not list(dump.parent.glob("*.part"))


def test_score_by_one_reward_with_parameters_from_stdin(dump: Path) -> None:
    arguments = ["score", "-", "-r", "em", "-p", "score=2", "-p", "format_score=0.5", "-o", "out.jsonl"]
    ended = command(*arguments, cwd=dump.parent, stdin=dump.read_text())
    assert ended.returncode == 0, ended.stderr
    assert [record["total"] for record in records(dump.parent / "out.jsonl")] == [2.0, 2.0, 0.5]


def test_malformed_rows_are_named_by_line_and_end_with_exit_code_1(dump: Path) -> None:
    dump.write_bytes(b"nonsense\n" + dump.read_bytes() + b"\xff\n")
    ended = command("score", str(dump), "-r", "em", cwd=dump.parent)
    assert ended.returncode == 1
    assert "line 1: it is not JSON" in ended.stdout
    assert "line 5: it is not JSON" in ended.stdout
    assert [record["status"] for record in records(dump.with_suffix(".scores.jsonl"))] == [
        "malformed",
        "ok",
        "ok",
        "ok",
        "malformed",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["score", "none.jsonl"], "none.jsonl cannot be read"),
        (["score", "dump.jsonl", "-r", "exact"], "there is no reward 'exact': --reward takes em, "),
        (["score", "dump.jsonl", "-r", "em", "-p", "skore=1"], "params.skore does not exist"),
        (["score", "dump.jsonl", "-r", "em", "-p", "score"], "--param score is not name=value"),
        (["score", "dump.jsonl", "-p", "score=1"], "--param belongs to --reward"),
        (["score", "dump.jsonl", "--data-source", "nq"], "data source 'nq' has no route"),
        (["score", "dump.jsonl", "-o", "nowhere/x"], "nowhere/x.part cannot be written"),
        (["score", "rows.parquet"], "use `forage reward score`"),
        (["score", "dump.jsonl", "-c", "none.yaml"], "none.yaml cannot be read"),
        (["explain", "-"], "a raw text needs accepted answers"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(dump: Path, arguments: list[str], sentence: str) -> None:
    ended = command(*arguments, cwd=dump.parent)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("forage: ")]
    assert sentence in line
    assert "Traceback" not in ended.stderr
    assert list(dump.parent.iterdir()) == [dump], "nothing half-written"
