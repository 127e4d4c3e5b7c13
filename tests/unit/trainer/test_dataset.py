"""Questions from Parquet: what is refused and in which words, what is filtered, and in which order they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_parts import build_question, write_questions

from forage_proto.v1.trajectory_pb2 import GroundTruth
from forage_queue.trainer import feeder
from forage_queue.trainer.feeder import QUESTIONS, Batches, refill_number, report_questions
from forage_records.questions import Question, Questions, read_questions
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.settings import load_settings
from forage_runtime.telemetry.label_names import OTHER, LabelNames


class Characters:
    """One token a character."""

    def count_prompt_tokens(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[int]:
        return [sum(len(message["content"]) for message in prompt) for prompt in prompts]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_row_becomes_a_question_with_its_uid(tmp_path: Path) -> None:
    result = read_questions([write_questions(tmp_path / "a.parquet", 3)])
    assert [q.uid(2) for q in result.rows] == [f"world_facts/train/{i}/2" for i in range(3)]
    assert result.rows[1].messages[0].content == "Question: what is number 1?"
    assert list(result.rows[1].ground_truth.targets) == ["n1"]


def test_countdown_problems_keep_target_and_numbers(tmp_path: Path) -> None:
    row = build_question(0) | {"reward_model": {"style": "rule", "ground_truth": {"target": 24, "numbers": [4, 6, 1]}}}
    truth = read_questions([write(tmp_path / "a.parquet", [row])]).rows[0].ground_truth
    assert truth.countdown_target == 24
    assert list(truth.countdown_numbers) == [4, 6, 1]
    assert not truth.targets


def test_the_plain_ground_truth_of_verl_is_one_target(tmp_path: Path) -> None:
    row = build_question(0) | {"reward_model": {"style": "rule", "ground_truth": "72"}}
    truth = read_questions([write(tmp_path / "a.parquet", [row])]).rows[0].ground_truth
    assert list(truth.targets) == ["72"]


def test_prompts_that_are_too_long_are_filtered_and_counted(tmp_path: Path) -> None:
    rows = [
        build_question(i) | {"prompt": [{"role": "user", "content": "x" * length}]}
        for i, length in enumerate((5, 11, 10))
    ]
    result = read_questions([write(tmp_path / "a.parquet", rows)]).filter_by_length(Characters(), 10)
    assert [q.index for q in result.rows] == [0, 2]
    assert result.filtered == {"world_facts": 1}


def test_the_limit_counts_questions_that_fit(tmp_path: Path) -> None:
    result = read_questions([write_questions(tmp_path / "a.parquet", 9)]).filter_by_length(Characters(), 100, limit=4)
    assert len(result.rows) == 4


def _change(**columns: Any) -> Callable[[], dict[str, Any]]:
    return lambda: build_question(0) | columns


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (_change(data_source=7), ["row 0", "'data_source'", "text", "7"]),
        (_change(prompt=[]), ["row 0", "'prompt'", "at least one"]),
        (_change(prompt="hello"), ["row 0", "'prompt'", "a list", "'hello'"]),
        (_change(prompt=[{"role": "user"}]), ["row 0", "'prompt.content'", "text", "None"]),
        (_change(reward_model={"style": "rule"}), ["row 0", "'reward_model.ground_truth'", "a struct"]),
        (
            _change(reward_model={"ground_truth": {"target": 1.5}}),
            ["row 0", "'reward_model.ground_truth.target'", "1.5"],
        ),
        (_change(reward_model={"ground_truth": {"target": 24}}), ["row 0", "numbers", "a list"]),
        (_change(extra_info={"split": "train", "index": "a"}), ["row 0", "'extra_info.index'", "an integer", "'a'"]),
        (_change(extra_info={"index": 1}), ["row 0", "'extra_info.split'", "text"]),
    ],
)
def test_a_malformed_row_is_named_with_column_and_expectation(
    tmp_path: Path, row: Callable[[], dict[str, Any]], words: list[str]
) -> None:
    file = write(tmp_path / "bad.parquet", [row()])
    with pytest.raises(DataError) as error:
        read_questions([file])
    for word in [str(file), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model", "extra_info"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    row = {name: value for name, value in build_question(0).items() if name != column}
    with pytest.raises(DataError, match=f"lacks the column '{column}'"):
        read_questions([write(tmp_path / "bad.parquet", [row])])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.parquet does not exist"):
        read_questions([tmp_path / "absent.parquet"])


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(DataError, match=r"text\.parquet cannot be read as Parquet"):
        read_questions([tmp_path / "text.parquet"])


def test_two_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [build_question(3), build_question(4), build_question(3)])
    with pytest.raises(DataError, match=r"row 2.*repeat those of .*row 0"):
        read_questions([file])


def test_no_question_that_fits_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="max_start_length"):
        read_questions([write_questions(tmp_path / "a.parquet", 3)]).filter_by_length(Characters(), 2)


@pytest.fixture
def no_names_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: other tests have used up the names of sources."""
    monkeypatch.setattr(feeder, "SOURCES", LabelNames())
    QUESTIONS.clear()


@pytest.mark.usefixtures("no_names_yet")
def test_filtered_questions_are_counted_by_source_and_reported(tmp_path: Path) -> None:
    sources = (("nq", 11), ("nq", 5), ("hotpotqa", 12), ("nq", 13))
    rows = [
        build_question(i, source) | {"prompt": [{"role": "user", "content": "x" * length}]}
        for i, (source, length) in enumerate(sources)
    ]
    result = read_questions([write(tmp_path / "a.parquet", rows)]).filter_by_length(Characters(), 10)
    assert result.filtered == {"nq": 2, "hotpotqa": 1}
    report_questions("train", result)
    tags = {
        (sample.labels["data_source"], sample.labels["fate"]): sample.value
        for metric in QUESTIONS.collect()
        for sample in metric.samples
        if sample.labels["split"] == "train"
    }
    assert tags == {("nq", "kept"): 1, ("nq", "filtered"): 2, ("hotpotqa", "filtered"): 1}


def test_any_number_of_data_sources_is_a_bounded_number_of_time_series() -> None:
    rows = tuple(Question(f's"{i}\n', "train", i, (), GroundTruth(), str(i), 0) for i in range(10_000))
    report_questions("many", Questions(rows, ""))
    shown = {
        sample.labels["data_source"]: sample.value
        for metric in QUESTIONS.collect()
        for sample in metric.samples
        if sample.labels["split"] == "many"
    }
    assert len(shown) <= 65
    assert sum(shown.values()) == 10_000
    assert shown[OTHER] >= 10_000 - 64


def build_questions(*counts: int) -> tuple[Question, ...]:
    """So many of each file, every file a source of its own."""
    return tuple(
        Question(f"s{file}", "train", i, (), GroundTruth(), str(i), file)
        for file, count in enumerate(counts)
        for i in range(count)
    )


def list_groups(batches: Batches, batch: int) -> list[tuple[str, Question]]:
    """(group uid, question) of every position."""
    return [batches.group(batch, position) for position in range(batches.batch_size)]


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 3))
def test_an_epoch_has_no_question_twice_and_uids_never_repeat(count: int, size: int, seed: int) -> None:
    size = min(size, count)
    batches = Batches(build_questions(count), size, seed)
    met = [uid for b in range(1, 3 * count // size + 1) for uid, _ in list_groups(batches, b)]
    assert len(met) == len(set(met))
    for epoch in range(len(met) // count):
        assert set(met[epoch * count : (epoch + 1) * count]) == {f"s0/train/{i}/{epoch}" for i in range(count)}
    assert met[:count] != met[count : 2 * count]


def test_a_batch_is_a_function_of_seed_and_number_alone() -> None:
    forward = Batches(build_questions(50), 7, 3)
    backward = Batches(build_questions(50), 7, 3)
    wanted = {b: list_groups(forward, b) for b in range(1, 20)}
    assert {b: list_groups(backward, b) for b in reversed(range(1, 20))} == wanted
    assert list_groups(Batches(build_questions(50), 7, 4), 1) != wanted[1]


def test_fewer_questions_than_a_batch_are_refused() -> None:
    with pytest.raises(DataError, match="train_batch_size = 9"):
        Batches(build_questions(8), 9, 0)


# Several files with weights.


def test_weights_mix_files_and_each_has_its_own_epochs() -> None:
    batches = Batches(build_questions(300, 40), 16, 5, [3.0, 1.0])
    met = [(uid, q) for b in range(1, 101) for uid, q in list_groups(batches, b)]
    assert len({uid for uid, _ in met}) == 1600
    share = sum(q.file == 0 for _, q in met) / 1600
    assert share == pytest.approx(0.75, abs=0.04)
    for file, count in ((0, 300), (1, 40)):
        uids = [uid for uid, q in met if q.file == file]
        for epoch in range(len(uids) // count):
            assert set(uids[epoch * count : (epoch + 1) * count]) == {
                f"s{file}/train/{i}/{epoch}" for i in range(count)
            }


def test_a_mixed_batch_is_a_function_of_seed_and_number_alone() -> None:
    def make(seed: int) -> Batches:
        return Batches(build_questions(9, 5, 30), 4, seed, [0.2, 0.2, 1.0])

    forward, backward = make(3), make(3)
    wanted = {b: list_groups(forward, b) for b in range(1, 30)}
    assert {b: list_groups(backward, b) for b in reversed(range(1, 30))} == wanted
    assert list_groups(make(4), 1) != wanted[1]


def test_a_weight_of_a_file_without_usable_questions_is_refused() -> None:
    with pytest.raises(DataError, match="file 2 has a weight and no usable question"):
        Batches(build_questions(8, 0), 4, 0, [1.0, 1.0])


def test_files_are_given_as_paths_or_with_weights() -> None:
    plain = load_settings(None, ["data.train_files=[a.parquet, b.parquet]"], {}).data
    assert [str(path) for path in plain.train_paths] == ["a.parquet", "b.parquet"]
    assert plain.train_weights == ()
    files = "[{path: a.parquet, weight: 3}, {path: b.parquet, weight: 0.5}]"
    assert load_settings(None, [f"data.train_files={files}"], {}).data.train_weights == (3.0, 0.5)
    for wrong, words in (
        ("[{path: a.parquet, weight: 3}, b.parquet]", "b.parquet has no weight and others have"),
        ("[{path: a.parquet, weight: -1}]", "greater than 0"),
        ("[{path: a.parquet, share: 1}]", "share"),
    ):
        with pytest.raises(SettingsError, match=words):
            load_settings(None, [f"data.train_files={wrong}"], {})


# Other questions in the place of one.


def test_refills_are_other_questions_of_the_same_source_with_their_own_uids() -> None:
    batches = Batches(build_questions(6, 6), 4, 0, [1.0, 1.0])
    uids = set()
    for batch in range(1, 9):
        for position in range(4):
            uid, first = batches.group(batch, position)
            refills = [batches.group(batch, position, n) for n in range(1, 6)]
            assert {q.index for _, q in refills} == set(range(6)) - {first.index}
            assert {q.data_source for _, q in refills} == {first.data_source}
            assert [refill_number(u) for u in (uid, *(u for u, _ in refills))] == list(range(6))
            uids |= {uid, *(u for u, _ in refills)}
    assert len(uids) == 8 * 4 * 6
    assert Batches(build_questions(1), 1, 0).group(1, 0, 2)[1].index == 0
