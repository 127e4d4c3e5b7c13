"""Bad input ends before anything starts, with one sentence that names the thing and the remedy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from model_folders import write_smallest_model

from forage_cli.local import home, preflight
from forage_records.questions import COLUMNS
from forage_records.training import list_training_checks
from forage_runtime.errors import DataError, UserError
from forage_runtime.problems import find_problems
from forage_runtime.settings import Settings, load_settings

ROW = {
    "data_source": "world_facts",
    "prompt": [{"role": "user", "content": "?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Oslo"]}},
    "extra_info": {"index": 0, "split": "train"},
}


def write_rows(file: Path, *rows: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows or [ROW])), file)
    return file


def give_golds(*golds: str, index: int = 0) -> dict[str, Any]:
    return ROW | {
        "reward_model": {"style": "rule", "ground_truth": {"target": list(golds)}},
        "extra_info": {"index": index, "split": "train"},
    }


def give_countdown(target: int, numbers: list[int]) -> dict[str, Any]:
    return ROW | {"reward_model": {"style": "rule", "ground_truth": {"target": target, "numbers": numbers}}}


def load_files(train: Path, val: Path | None = None, *overrides: str) -> Settings:
    files = [f"data.train_files=[{train}]", f"data.val_files=[{val or train}]"]
    sizes = ["data.train_batch_size=1", "trainer.actor.ppo_mini_batch_size=1"]
    return load_settings(None, [*files, *sizes, *overrides], {})


def test_a_broken_line_deep_in_a_corpus_is_named_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(f'{{"id": {number}, "contents": "x"}}\n' for number in range(2000)) + "{oops\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl:2001 is not JSON"):
        preflight.check_corpus(file)


def test_an_empty_corpus_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl is empty"):
        preflight.check_corpus(tmp_path / "corpus.jsonl")


@pytest.mark.parametrize("line", ["not json", "[]", '{"id": 3.5, "contents": "x"}', '{"id": "3"}'])
def test_a_corpus_whose_first_line_is_no_passage_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl:1"):
        preflight.check_corpus(file)


def test_what_the_retriever_reads_is_a_corpus(tmp_path: Path) -> None:
    lines = '{"id": 1, "contents": "x"}\n{"id": "2", "contents": "y"}\n'
    made = {
        "numbers.jsonl": lines.encode(),
        "mark.jsonl": b"\xef\xbb\xbf" + lines.encode(),
        "blank.jsonl": b"\n" + lines.encode(),
        "mark-blank.jsonl": b"\xef\xbb\xbf\r\n" + lines.encode(),
        "windows.jsonl": lines.replace("\n", "\r\n").encode(),
        "packed.jsonl.gz": gzip.compress(lines.encode()),
        "capitals.JSONL.GZ": gzip.compress(lines.encode()),
        "unpacked-by-name.jsonl": gzip.compress(lines.encode()),
        "folder/part.JSONL": lines.encode(),
    }
    (tmp_path / "folder/no-file.jsonl").mkdir(parents=True)
    (tmp_path / "folder/._part.jsonl").write_bytes(b"\0of macOS")
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
        preflight.check_corpus(tmp_path / name)
    preflight.check_corpus(tmp_path / "folder")


def test_an_id_that_two_passages_have_is_named(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": 1, "contents": "x"}\n{"id": 2, "contents": "x"}\n{"id": "1", "contents": "x"}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl:3: the passage has the id '1' of .*corpus\.jsonl:1: make ids"):
        preflight.check_corpus(file)


def test_a_missing_corpus_is_named_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus .*none.*forage data world"):
        preflight.check_corpus(tmp_path / "none")


@pytest.mark.parametrize("column", COLUMNS)
def test_a_question_file_without_a_column_is_named_with_the_column(tmp_path: Path, column: str) -> None:
    file = write_rows(tmp_path / "q.parquet", {name: value for name, value in ROW.items() if name != column})
    with pytest.raises(DataError, match=rf"q\.parquet lacks the column '{column}'"):
        preflight.check_questions(load_files(file))


def test_a_question_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    file = tmp_path / "q.parquet"
    file.write_text(json.dumps({"a": 1}))
    with pytest.raises(DataError, match=r"q\.parquet cannot be read as Parquet"):
        preflight.check_questions(load_files(file))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROW | {"reward_model": {"ground_truth": 72}}], r"row 0: column 'reward_model\.ground_truth' .* 72"),
        ([ROW | {"extra_info": {"index": "0", "split": "train"}}], r"row 0: column 'extra_info\.index' .* '0'"),
        ([ROW | {"extra_info": {"index": 0.0, "split": "train"}}], r"row 0: column 'extra_info\.index' .* 0\.0"),
        ([ROW | {"extra_info": {"index": True, "split": "train"}}], r"row 0: column 'extra_info\.index' .* True"),
        ([give_countdown(3, [True, False])], r"row 0: column 'reward_model\.ground_truth' must hold .*True"),
        ([give_countdown(3, [])], r"row 0: column 'reward_model\.ground_truth' must hold .*\[\]"),
        ([ROW, ROW], r"row 1: data_source, extra_info\.split and extra_info\.index repeat those of .* row 0"),
        ([ROW | {"data_source": 7}], r"row 0: column 'data_source' must be text, not 7"),
    ],
)
def test_what_the_trainer_refuses_is_refused_before_the_start(
    tmp_path: Path, rows: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        preflight.check_questions(load_files(write_rows(tmp_path / "q.parquet", *rows)))


@pytest.mark.parametrize(
    ("column", "names", "values"),
    [("extra_info", ["index", "split"], ["train"]), ("ground_truth", ["target", "numbers"], [[1]])],
)
def test_a_number_of_64_bits_without_a_sign_is_refused_where_it_is_too_large(
    tmp_path: Path, column: str, names: list[str], values: list[Any]
) -> None:
    large = pyarrow.StructArray.from_arrays([pyarrow.array([2**63], pyarrow.uint64()), pyarrow.array(values)], names)
    if column == "ground_truth":
        column, large = "reward_model", pyarrow.StructArray.from_arrays([large], [column])
    table = pyarrow.Table.from_pylist([ROW])
    table = table.set_column(table.schema.get_field_index(column), column, large)
    pyarrow.parquet.write_table(table, tmp_path / "q.parquet")
    with pytest.raises(DataError, match=rf"row 0: column '{column}.*64 bits, not .*9223372036854775808"):
        preflight.check_questions(load_files(tmp_path / "q.parquet"))


def test_too_few_questions_are_refused_before_the_start(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "q.parquet")
    with pytest.raises(DataError, match=r"1 usable questions, fewer than data\.train_batch_size = 2"):
        preflight.check_questions(load_files(file, None, "data.train_batch_size=2"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]).slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none\.parquet has no rows"):
        preflight.check_questions(load_files(file, tmp_path / "none.parquet"))


def test_accepted_answers_that_match_nothing_are_named(tmp_path: Path) -> None:
    file = write_rows(
        tmp_path / "q.parquet",
        give_golds("Oslo", "The"),
        *(give_golds(gold, index=index) for index, gold in enumerate(["A", "B", "?!", "", " the "], 1)),
    )
    train, val = preflight.check_questions(load_files(file))
    for place in ("row 0: 'The'", "row 1: 'A'", "row 3: '?!'", "row 4: ''", "row 5: ' the '"):
        assert f"{file} {place}" in train
    assert train.startswith("data.train_files: 5 accepted answers match nothing")
    assert "4 of them are the only one of their question" in train
    assert val == train.replace("train_files", "val_files")
    fine = write_rows(tmp_path / "fine.parquet")
    assert preflight.check_questions(load_files(fine)) == []


@pytest.mark.parametrize("estimator", ["grpo", "grpo_multiturn", "rloo"])
def test_one_sample_of_a_prompt_is_refused_where_samples_are_compared(tmp_path: Path, estimator: str) -> None:
    write_smallest_model(tmp_path)
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "x"}\n')
    file = write_rows(tmp_path / "q.parquet")
    paths = [f"model.path={tmp_path / 'model'}", f"data.corpus={tmp_path}/corpus.jsonl", "rollout.n=1"]
    settings = load_files(file, None, *paths, f"trainer.algorithm.adv_estimator={estimator}")
    with pytest.raises(UserError, match=rf"rollout\.n must be at least 2, not 1: {estimator} compares the samples"):
        preflight.check_files(settings)
    assert preflight.check_files(settings, training=False) == []
    for alone in ("gae", "reinforce_plus_plus"):
        assert preflight.check_files(load_files(file, None, *paths, f"trainer.algorithm.adv_estimator={alone}")) == []


def test_a_policy_that_is_never_trained_is_refused() -> None:
    gae = ["trainer.algorithm.adv_estimator=gae", "trainer.total_training_steps=10"]
    assert find_problems(list_training_checks(load_settings(None, [*gae, "trainer.critic_warmup=9"], {}))) == []
    (problem,) = find_problems(list_training_checks(load_settings(None, [*gae, "trainer.critic_warmup=10"], {})))
    assert "critic_warmup = 10 must be less than trainer.total_training_steps = 10" in problem


def test_a_data_source_without_a_reward_is_named_before_the_run_starts(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "q.parquet", ROW | {"data_source": "nq"})
    overrides = ["reward.routes={world_facts: {name: em}}"]
    with pytest.raises(UserError, match=r"'nq' of .*q\.parquet has no reward: add reward\.routes\.nq\.name"):
        preflight.check_questions(load_files(file, None, *overrides))


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


def test_trajectories_longer_than_a_micro_batch_are_refused_with_the_numbers(tmp_path: Path) -> None:
    write_smallest_model(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "x"}\n')
    paths = [f"model.path={tmp_path / 'model'}", f"data.corpus={corpus}"]
    settings = load_files(write_rows(tmp_path / "q.parquet"), None, *paths)
    preflight.check_files(settings)
    rollout = settings.rollout.model_copy(update={"max_turns": 31})
    long = settings.model_copy(update={"rollout": rollout})
    with pytest.raises(
        UserError, match=r"may have 8256 tokens .*, and trainer\.actor\.ppo_max_token_len_per_gpu = 8192"
    ):
        preflight.check_files(long)
    preflight.check_files(long, training=False)


@pytest.mark.parametrize("installed_from", ["a checkout without the services", "an image"])
def test_what_services_check_is_left_to_them_where_they_are_not_installed(
    installed_from: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_home() -> Path:
        if installed_from == "an image":
            raise UserError("the command alone is installed")
        return tmp_path

    monkeypatch.setattr(home, "find_home", find_home)
    write_smallest_model(tmp_path)
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "x"}\n')
    paths = [f"model.path={tmp_path / 'model'}", f"data.corpus={tmp_path}/corpus.jsonl", "rollout.temperature=3"]
    (sentence,) = preflight.check_settings(load_files(write_rows(tmp_path / "q.parquet"), None, *paths))
    assert sentence.startswith("warning: what reward, retriever, rollout, trainer check was not checked")


def test_every_problem_is_said_at_once_a_line_each(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "q.parquet", ROW | {"data_source": "nq"})
    paths = [f"model.path={tmp_path / 'none'}", f"data.corpus={tmp_path}/none.jsonl", "rollout.n=1"]
    settings = load_files(file, None, *paths, "reward.routes={world_facts: {name: em}}", "rollout.top_k=5")
    with pytest.raises(UserError) as error:
        preflight.check_files(settings)
    named = ("model.path ", "none.jsonl", "rollout.n must", "rollout.top_k = 5", "data source 'nq'")
    lines = str(error.value).splitlines()
    assert len(lines) == len(named)
    assert all(name in line for name, line in zip(named, lines, strict=True))
