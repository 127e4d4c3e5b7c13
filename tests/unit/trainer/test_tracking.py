"""Metrics for trackers: their names, TensorBoard's real files, and trackers that are missing or break."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import verl.utils.tracking  # noqa: F401  (on import, a package of its tries whether the machine has IPv6)

from forage_runtime.errors import UserError
from forage_runtime.settings import Settings, load_settings
from forage_trainer.reporting.metrics import to_verl_names
from forage_trainer.reporting.tracking import (
    FAILED,
    Tracker,
    require_backend,
    to_table,
    to_tracker_metrics,
    to_validation_metrics,
)

LINE = {
    "step": 3,
    "total_steps": 40,
    "reward_mean": 0.5,
    "kl_ref": None,
    "tokens": 1000,
    "search_rate": 0.75,
    "actor/pg_loss": 0.1,
    "guards": ["kl"],
    "grad_norm": math.nan,
    "seconds": {"wait": 1.0, "logp": 0.5, "total": 2.5},
    "time": 1.7e9,
} | to_verl_names({"reward_mean": 0.5, "grad_norm": math.nan})


def test_metrics_have_verls_names_once_and_others_are_below_forage() -> None:
    result = to_tracker_metrics(LINE)
    assert math.isnan(result.pop("actor/grad_norm"))
    assert result == {
        "training/global_step": 3,
        "forage/total_steps": 40,
        "critic/score/mean": 0.5,
        "perf/total_num_tokens": 1000,
        "forage/search_rate": 0.75,
        "actor/pg_loss": 0.1,
        "timing_s/wait": 1.0,
        "timing_s/old_log_prob": 0.5,
        "timing_s/step": 2.5,
    }


def test_a_validation_has_exact_match_by_source() -> None:
    result = {"label": "after", "version": 3, "em": 0.25, "em/nq": 0.5, "em/musique": None, "seconds": 1.5}
    assert to_validation_metrics(result) == {
        "val-core/nq/em/mean@1": 0.5,
        "forage/validation/em": 0.25,
        "forage/validation/version": 3,
        "forage/validation/seconds": 1.5,
    }


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo changes of trackers to the environment after the test."""
    for name in ("TENSORBOARD_DIR", "WANDB_DIR", "MLFLOW_TRACKING_URI", "TRACKIO_DIR", "SWANLAB_LOG_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def build_settings(tmp_path: Path, *loggers: str) -> Settings:
    return load_settings(None, [f"run.dir={tmp_path}", "run.id=tracked", f"trainer.logger=[{','.join(loggers)}]"], {})


def write_answers(run: Path, count: int) -> None:
    spans = ("prompt", "the prompt"), ("model", "<search>q</search>"), ("env", "<information>d</information>")
    rows = [
        {
            "question": f"Q{number}?",
            "targets": ["a", "b"],
            "em": 1.0,
            "spans": [{"role": role, "text": text} for role, text in spans],
        }
        for number in range(count)
    ]
    (run / "validation").mkdir(parents=True)
    (run / "validation" / "after.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [(10, 3, [0, 3, 6]), (2, 8, [0, 1]), (15, 8, [0, 1, 3, 5, 7, 9, 11, 13]), (0, 8, [])],
)
def test_a_table_is_of_questions_from_the_whole_validation(total: int, count: int, expected: list[int]) -> None:
    records = [{"question": str(number), "targets": ["x"], "em": None, "spans": []} for number in range(total)]
    assert to_table(records, count) == [(f"{number}\n\naccepted: x", "", None) for number in expected]


def test_tensorboard_reads_the_metrics_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = build_settings(tmp_path, "tensorboard")
    trainer = settings.trainer.model_copy(update={"log_val_generations": 2})
    tracker = Tracker(settings.model_copy(update={"trainer": trainer}))
    tracker.log_step(1, LINE | {"search_rate": 0.25})
    tracker.log_step(2, LINE)
    write_answers(tmp_path / "tracked", 5)
    tracker.log_validation(2, {"label": "after", "em/nq": 0.5})
    tracker.close(done=True)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "tracked" / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("forage/search_rate")] == [(1, 0.25), (2, 0.75)]
    assert [(e.step, e.value) for e in read.Scalars("val-core/nq/em/mean@1")] == [(2, 0.5)]
    assert "actor/grad_norm" in read.Tags()["scalars"]
    (event,) = read.Tensors("val/generations/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert [f"Q{number}?" in text for number in range(5)] == [True, False, True, False, False], "two of five, evenly"
    assert "accepted: a; b" in text
    assert "<search>q</search><information>d</information>" in text
    assert "the prompt" not in text


def test_a_step_repeated_after_a_resume_is_not_sent_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[int] = []
    for steps in ((1, 2, 3), (2, 3, 4)):
        tracker = Tracker(build_settings(tmp_path, "tensorboard"))
        monkeypatch.setattr(tracker._tracking, "log", lambda data, step, backend: logged.append(step))
        for step in steps:
            tracker.log_step(step, LINE)
        tracker.close(done=False)
    assert logged == [1, 2, 3, 4]


def test_a_run_without_trackers_writes_none(tmp_path: Path) -> None:
    tracker = Tracker(build_settings(tmp_path))
    tracker.log_step(1, LINE)
    tracker.close(done=False)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tracker_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"names wandb, which is not installed: run '.*uv pip install .*trackers\.lock'"
    ):
        require_backend("wandb")


def test_a_failing_tracker_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(build_settings(tmp_path, "tensorboard"))

    def fail_to_log(data: dict[str, Any], step: int) -> None:
        raise ConnectionError("the tracker is gone")

    monkeypatch.setattr(tracker._tracking.logger["tensorboard"], "log", fail_to_log)
    before = FAILED.labels("tensorboard")._value.get()
    tracker.log_step(1, LINE)
    tracker.log_step(2, LINE)
    assert FAILED.labels("tensorboard")._value.get() == before + 2
    tracker.close(done=False)
