"""Bad input ends before anything starts, with one sentence that names the thing and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from model_folders import write_smallest_model

from forage_cli.local import preflight
from forage_common.errors import DataError, UserError
from forage_common.settings import load_settings


def write_rows(file: Path, leave_out: str = "", source: str = "world_facts") -> Path:
    row = {
        "data_source": source,
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"style": "rule"},
        "extra_info": {"index": 0},
    }
    row.pop(leave_out, None)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    return file


def test_a_broken_line_deep_in_a_corpus_is_named_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": "1", "contents": "x"}\n' * 2000 + "{oops\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 2001 is not a passage"):
        preflight.check_corpus(file)


def test_an_empty_corpus_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(DataError, match=r"corpus\.jsonl is empty"):
        preflight.check_corpus(tmp_path / "corpus.jsonl")


@pytest.mark.parametrize("line", ["", "not json", "[]", '{"id": 3, "contents": "x"}', '{"id": "3"}'])
def test_a_corpus_whose_first_line_is_no_passage_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 1 is not a passage: expected"):
        preflight.check_corpus(file)


def test_a_missing_corpus_is_named_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus .*none.*forage data world"):
        preflight.check_corpus(tmp_path / "none")


@pytest.mark.parametrize("column", preflight.COLUMNS)
def test_a_question_file_without_a_column_is_named_with_the_column(tmp_path: Path, column: str) -> None:
    with pytest.raises(DataError, match=rf"q\.parquet lacks the column {column}"):
        preflight.check_questions(write_rows(tmp_path / "q.parquet", leave_out=column), {"world_facts"})


def test_a_question_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    file = tmp_path / "q.parquet"
    file.write_text(json.dumps({"a": 1}))
    with pytest.raises(DataError, match=r"q\.parquet is not Parquet"):
        preflight.check_questions(file, set())


def test_a_data_source_without_a_reward_is_named_before_the_run_starts(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "q.parquet", source="nq")
    with pytest.raises(UserError, match=r"'nq' of .*q\.parquet has no reward: add reward\.routes\.nq\.name"):
        preflight.check_questions(file, {"world_facts"})


def test_too_little_disk_space_is_named_with_the_space_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_SPACE_GIB", 1e9)
    with pytest.raises(UserError, match=r"GiB free, a run needs 1000000000\.0"):
        preflight.check_space(tmp_path / "not" / "yet" / "there")


def test_a_remote_model_needs_no_weights_and_cannot_be_trained(tmp_path: Path) -> None:
    (write_smallest_model(tmp_path) / "model.safetensors").unlink()
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "x"}\n')
    paths = [f"model.path={tmp_path / 'model'}", f"data.corpus={corpus}"]
    settings = load_settings(None, paths)
    with pytest.raises(DataError, match="has no usable weights"):
        preflight.check_files(settings, training=False)
    settings = load_settings(None, [*paths, "rollout.engine.endpoint=http://host:1/v1"])
    preflight.check_files(settings, training=False)
    with pytest.raises(UserError, match=r"endpoint is http://host:1/v1: .* cannot be trained; unset it"):
        preflight.check_files(settings)


def test_an_index_of_lucene_is_refused_with_the_command_that_builds_one(tmp_path: Path) -> None:
    write_smallest_model(tmp_path)
    (tmp_path / "bm25").mkdir()
    (tmp_path / "bm25/segments_1").touch()
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "x"}\n')
    paths = [f"model.path={tmp_path / 'model'}", f"data.corpus={tmp_path}/corpus.jsonl"]
    settings = load_settings(None, [*paths, f"retriever.index={tmp_path}/bm25"])
    command = rf"forage index build {tmp_path}/bm25-forage --mode bm25 --corpus {tmp_path}/corpus\.jsonl"
    with pytest.raises(UserError, match=rf"retriever\.index: .*{command}"):
        preflight.check_files(settings, training=False)


def test_trajectories_longer_than_a_micro_batch_are_refused_with_the_numbers(tmp_path: Path) -> None:
    write_smallest_model(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "x"}\n')
    files = [f"data.train_files=[{write_rows(tmp_path / 'q.parquet')}]", f"data.val_files=[{tmp_path / 'q.parquet'}]"]
    settings = load_settings(None, [f"model.path={tmp_path / 'model'}", f"data.corpus={corpus}", *files])
    preflight.check_files(settings)
    rollout = settings.rollout.model_copy(update={"max_turns": 31})
    long = settings.model_copy(update={"rollout": rollout})
    with pytest.raises(
        UserError, match=r"may have 8256 tokens .*, and trainer\.actor\.ppo_max_token_len_per_gpu = 8192"
    ):
        preflight.check_files(long)
    preflight.check_files(long, training=False)
