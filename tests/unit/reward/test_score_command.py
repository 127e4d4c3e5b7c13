"""`python -m forage_reward.command`, to which `forage reward` forwards."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from forage_reward.command.main import main
from forage_reward.registry import REWARDS
from forage_runtime.files.parquet_rows import PARQUET_READER

Command = Callable[..., "Ended"]

RIGHT = "<think>t</think><answer>Oslo</answer>"
ROWS = [
    {"text": RIGHT, "targets": ["Oslo"], "data_source": "world_facts"},
    {"text": "but " + RIGHT, "targets": ["Oslo"], "data_source": "world_facts"},
    {"text": RIGHT, "targets": ["Rome"]},
]


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run the command in this process, in the test's folder: starting an interpreter takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv(PARQUET_READER, raising=False)
    monkeypatch.setattr("forage_reward.command.main.configure_logs", lambda *_: None)  # logs of later tests stay

    def run(*arguments: str, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["forage_reward.command", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return Ended(int(ended.value.code or 0), output.out, output.err)

    return run


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    file = tmp_path / "dump.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def read_records(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_byte_order_mark_is_no_part_of_the_first_row(command: Command, dump: Path) -> None:
    dump.write_bytes(b"\xef\xbb\xbf" + dump.read_bytes())
    command("score", dump.name, "--reward", "em", "-o", "file.jsonl")
    command("score", "-", "--reward", "em", "-o", "stdin.jsonl", stdin=dump.read_text())
    for file in ("file.jsonl", "stdin.jsonl"):
        assert [row["total"] for row in read_records(dump.with_name(file))] == [1.0, 1.0, 0.0]


def test_list_names_every_reward_and_its_parameters(command: Command) -> None:
    shown = command("list").stdout
    for name, reward in REWARDS.items():
        assert name in shown
        assert all(f"{parameter}=" in shown for parameter in reward.params.model_fields)


def test_explain_shows_the_path_to_the_violation_and_the_rule_that_applied(command: Command) -> None:
    ended = command("explain", "--target", "Oslo", stdin="but " + RIGHT)
    assert ended.returncode == 0, ended.stderr
    (violation,) = [line for line in ended.stdout.splitlines() if "not allowed here" in line]
    assert violation.split("│")[1:3] == [" start ", " but   "]
    assert "right answer, invalid format: text 'but' may not come in state start" in ended.stdout
    (footer,) = [line for line in ended.stdout.splitlines() if line.startswith("│ total")]
    assert "0.8" in footer


def test_explain_shows_every_step_of_a_valid_row(command: Command) -> None:
    ended = command("explain", "-", "--reward", "em", stdin=json.dumps(ROWS[0]))
    steps = [line.split("│")[2].strip() for line in ended.stdout.splitlines() if line.count("│") == 4]
    assert steps[:6] == ["<think>", "t", "</think>", "<answer>", "Oslo", "</answer>"]
    assert "valid" in ended.stdout
    assert "score of em" in ended.stdout


def test_score_by_the_routes_of_the_settings(command: Command, dump: Path) -> None:
    ended = command("score", str(dump), "--data-source", "world_facts")
    assert ended.returncode == 0, ended.stderr
    written = read_records(dump.with_suffix(".scores"))
    assert [record["total"] for record in written] == pytest.approx([1.0, 0.8, 0.2])
    assert [record["validation"]["total"] for record in written] == [1.0, 1.0, 0.0]  # type: ignore[index]
    assert "3 rows in, 3 out" in ended.stdout
    assert not list(dump.parent.glob("*.part"))


def test_score_by_one_reward_with_parameters_from_stdin(command: Command, dump: Path) -> None:
    arguments = ["score", "-", "-r", "em", "-p", "score=2", "-p", "format_score=0.5", "-o", "out.jsonl"]
    ended = command(*arguments, stdin=dump.read_text())
    assert ended.returncode == 0, ended.stderr
    assert [record["total"] for record in read_records(dump.parent / "out.jsonl")] == [2.0, 2.0, 0.5]


def test_malformed_rows_are_named_by_line_and_end_with_exit_code_1(command: Command, dump: Path) -> None:
    dump.write_bytes(b"nonsense\n" + dump.read_bytes() + b"\xff\n")
    ended = command("score", str(dump), "-r", "em")
    assert ended.returncode == 1
    assert "line 1: it is not JSON" in ended.stdout
    assert "line 5: it is not JSON" in ended.stdout
    assert [record["status"] for record in read_records(dump.with_suffix(".scores"))] == [
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
        (["score", "dump.jsonl", "-r", "em", "-o", "./dump.jsonl"], "is the file that is scored"),
        (["explain", "-"], "a raw text needs accepted answers"),
        (["explain", "-", "--line", "2"], "it has 1 row: --line 2 is none of them"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    command: Command, dump: Path, arguments: list[str], sentence: str
) -> None:
    ended = command(*arguments)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("forage: ")]
    assert sentence in line
    assert "Traceback" not in ended.stderr
    assert list(dump.parent.iterdir()) == [dump], "no partial output"
    assert len(read_records(dump)) == len(ROWS)
