"""Metrics of steps are read as columns, on from where the last reading ended."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_lines
from upath import UPath

from forage_console.reading.metrics import StepMetrics, average, sample_lines


def append(file: Path, text: str) -> None:
    with file.open("a") as stream:
        stream.write(text)


def build_step(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "total_steps": 9, "time": 100.0 + step, "reward_mean": step / 10} | values


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "metrics.jsonl"
    file.write_text(write_lines([build_step(1), build_step(2, kl_ref=0.5)]))
    return file


@pytest.fixture
def metrics(file: Path) -> StepMetrics:
    metrics = StepMetrics(UPath(file))
    metrics.refresh()
    return metrics


def test_a_value_that_a_step_has_not_is_none(file: Path, metrics: StepMetrics) -> None:
    append(
        file, write_lines([build_step(3, reward_mean=None), build_step(4, lr=math.nan), build_step(5, lr=-math.inf)])
    )
    metrics.refresh()
    assert list(metrics.steps) == [1, 2, 3, 4, 5]
    assert metrics.read_column("reward_mean") == [0.1, 0.2, None, 0.4, 0.5]
    assert metrics.read_column("kl_ref") == [None, 0.5, None, None, None]
    assert metrics.read_column("lr") == metrics.read_column("unheard") == [None] * 5
    assert metrics.read_column("kl_ref", 1) == [0.5, None, None, None]
    assert metrics.read_last() == {"reward_mean": 0.5, "kl_ref": None, "lr": None}
    assert metrics.total == 9


def test_phases_are_columns_and_texts_are_not(file: Path, metrics: StepMetrics) -> None:
    more = {"seconds": {"wait": 2.0, "total": 3.0}, "guards": ["kl"], "tokens_digest": "t", "flag": True, "note": "x"}
    append(file, write_lines([build_step(3, **more)]))
    metrics.refresh()
    assert metrics.read_column("seconds.wait") == [None, None, 2.0]
    assert sorted(metrics.columns) == ["kl_ref", "reward_mean", "seconds.total", "seconds.wait"]
    assert metrics.guards == [(3, "kl")]
    assert metrics.digests == {3: {"tokens_digest": "t"}}


def test_a_line_is_read_once_it_is_whole(file: Path, metrics: StepMetrics) -> None:
    line = write_lines([build_step(3)])
    append(file, line[:20])
    metrics.refresh()
    assert list(metrics.steps) == [1, 2]
    assert metrics.problem is None
    append(file, line[20:])
    metrics.refresh()
    assert list(metrics.steps) == [1, 2, 3]


def test_only_what_is_new_is_read(file: Path, metrics: StepMetrics) -> None:
    content = bytearray(file.read_bytes())
    place = content.index(b'"reward_mean": 0.1')
    with file.open("r+b") as stream:  # the file itself is changed, at the same place of the disk
        stream.seek(place)
        stream.write(b'"reward_mean": 0.9')
    append(file, write_lines([build_step(3)]))
    metrics.refresh()
    assert metrics.read_column("reward_mean") == [0.1, 0.2, 0.3], "the first line was not read again"


def test_a_file_that_was_written_anew_is_read_anew(file: Path, metrics: StepMetrics) -> None:
    new = file.with_suffix(".new")
    new.write_text(write_lines([build_step(1, reward_mean=0.7), build_step(2), build_step(3), build_step(4)]))
    new.replace(file)
    metrics.refresh()
    assert metrics.read_column("reward_mean") == [0.7, 0.2, 0.3, 0.4]
    file.write_text(write_lines([build_step(1)]))  # shorter
    metrics.refresh()
    assert list(metrics.steps) == [1]
    file.write_text(write_lines([build_step(1, reward_mean=0.8), build_step(2), build_step(3)]))  # longer, and other
    metrics.refresh()
    assert metrics.read_column("reward_mean") == [0.8, 0.2, 0.3]
    file.unlink()
    metrics.refresh()
    assert not metrics.steps
    assert metrics.problem is None, "a run that takes its first step has no file"


def test_a_step_that_was_taken_again_counts_once(file: Path, metrics: StepMetrics) -> None:
    append(file, write_lines([build_step(3, guards=["kl"]), build_step(2, reward_mean=0.8), build_step(3)]))
    metrics.refresh()
    assert list(metrics.steps) == [1, 2, 3]
    assert metrics.read_column("reward_mean") == [0.1, 0.8, 0.3]
    assert metrics.read_column("kl_ref") == [None, None, None]
    assert metrics.guards == []


@pytest.mark.parametrize("line", ["{", "[]", '"text"', '{"reward_mean": 1}', '{"step": "x"}', '{"step": -1}', "\0\0"])
def test_a_damaged_line_is_left_out_and_said(file: Path, metrics: StepMetrics, line: str) -> None:
    append(file, line + "\n" + write_lines([build_step(3)]))
    metrics.refresh()
    assert list(metrics.steps) == [1, 2, 3]
    assert metrics.problem == "1 lines of metrics.jsonl cannot be read: they are left out"


@pytest.mark.parametrize("step", [1e300, math.inf, 2.0**60, True])
def test_a_step_is_a_number_that_browsers_have(file: Path, metrics: StepMetrics, step: float) -> None:
    append(file, json.dumps({"step": step}) + "\n")
    metrics.refresh()
    assert list(metrics.steps) == [1, 2]


def test_what_is_no_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    metrics = StepMetrics(UPath(tmp_path / "metrics.jsonl"))
    metrics.refresh()
    assert metrics.problem == "metrics.jsonl cannot be read (Is a directory)"


def test_an_object_store_is_read_anew(file: Path) -> None:
    kept = UPath("memory://metrics-test/metrics.jsonl")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(file.read_bytes())
    metrics = StepMetrics(kept)
    metrics.refresh()
    kept.write_bytes(file.read_bytes() + write_lines([build_step(3)]).encode())
    metrics.refresh()
    assert list(metrics.steps) == [1, 2, 3]


def test_a_large_file_is_sampled_and_its_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(write_lines(build_step(step, note="x" * 500) for step in range(1, 5001)))
    sample = sample_lines(UPath(file), os.path.getsize(file), 40)
    steps = [row["step"] for row in sample.spread]
    assert len(steps) == 41
    assert (steps[0], steps[-1]) == (1, 5000)
    assert max(b - a for a, b in pairwise(steps)) < 200
    assert [row["step"] for row in sample.recent[-20:]] == list(range(4981, 5001))


def test_averages_leave_unknown_values_out() -> None:
    assert average([1.0, None, 3.0], 5) == [1.0, None, 3.0]
    assert average([1.0, 3.0, None, 5.0, None, None], 3) == [2.0, 5.0, None]
