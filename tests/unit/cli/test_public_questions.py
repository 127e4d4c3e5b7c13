"""Public data sets: converted from files in FlashRAG's layout, or from a server that stands for the Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from public_rows import ROWS, write_rows
from typer.testing import CliRunner

from forage_cli.commands.data import app
from forage_cli.datasets.public_questions import convert_collection
from forage_records.questions import read_questions
from forage_runtime.errors import DataError, UserError


def test_the_trainer_reads_converted_public_questions(tmp_path: Path) -> None:
    summary = convert_collection("nq", {"train": write_rows(tmp_path / "in.jsonl", ROWS)}, tmp_path / "nq")
    assert summary.questions == {"train": 3}
    assert summary.dropped == {"train": {"no question": 1, "no answer": 1}}
    read = read_questions([tmp_path / "nq" / "train.parquet"]).rows
    assert [q.uid(0) for q in read] == ["nq/train/0/0", "nq/train/1/0", "nq/train/4/0"]
    assert [q.text for q in read] == ["who got the first nobel prize in physics?", "When was it?", "last one?"]
    assert [list(q.ground_truth.targets) for q in read] == [["Wilhelm Röntgen"], ["1901", "in 1901"], ["alone"]]
    (message,) = read[0].messages
    assert message.content.endswith("Question: who got the first nobel prize in physics?\n")
    manifest = json.loads((tmp_path / "nq" / "manifest.json").read_text())
    assert (manifest["data_source"], manifest["dropped"]) == ("nq", summary.dropped)
    assert manifest["sha256"] == summary.digests


def test_parquet_gives_the_same_questions_as_jsonl(tmp_path: Path) -> None:
    rows = [{**row, "golden_answers": list(row["golden_answers"])} for row in ROWS[:4]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    lines = convert_collection("musique", {"dev": write_rows(tmp_path / "in.jsonl", rows)}, tmp_path / "lines")
    assert convert_collection("musique", {"dev": tmp_path / "in.parquet"}, tmp_path / "parquet") == lines


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"id": "a", "question": "q?", "golden_answers": ["x"]}\n{"id"', "in.jsonl, line 2 is not JSON"),
        ("[1]\n", "line 1 is [1]: expected an object"),
        ('{"query": "q?", "answer": "x"}\n', "has no 'question' (it has: query, answer)"),
        ('{"question": 1, "golden_answers": ["x"]}\n', "'question' is 1: expected text"),
        ('{"question": "q", "golden_answers": [1]}\n', "'golden_answers' is [1]: expected a list of texts"),
        ('{"question": "", "golden_answers": ["x"]}\n', "no question with an answer (1 with no question)"),
        ("", "no question with an answer (it is empty)"),
    ],
)
def test_an_invalid_file_is_an_error_and_nothing_is_written(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(DataError) as error:
        convert_collection("nq", {"train": tmp_path / "in.jsonl"}, tmp_path / "out")
    assert sentence in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_file_and_a_parquet_of_other_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl cannot be read \(No such file"):
        convert_collection("nq", {"train": tmp_path / "gone.jsonl"}, tmp_path / "out")
    pq.write_table(pa.table({"question": ["q"]}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"in\.parquet has no 'golden_answers' \(it has: question\)"):
        convert_collection("nq", {"train": tmp_path / "in.parquet"}, tmp_path / "out")
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"text\.parquet cannot be read"):
        convert_collection("nq", {"train": tmp_path / "text.parquet"}, tmp_path / "out")


def test_the_command_takes_files_by_split(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "in.jsonl", ROWS)
    done = CliRunner().invoke(app, ["popqa", "--out", str(tmp_path / "out"), "--file", f"test={file}"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "test.parquet").exists()
    for wrong in ("in.jsonl", "=in.jsonl", "test="):
        refused = CliRunner().invoke(app, ["popqa", "--out", str(tmp_path / "no"), "--file", wrong])
        assert isinstance(refused.exception, UserError)
        assert f"--file is {wrong!r}" in str(refused.exception)
