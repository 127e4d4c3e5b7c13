"""A question over time: its appearances in validations and among watched questions, with what was written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from console_client import ConsoleClient
from run_folders import write_run

from forage_proto.v1.trajectory_pb2 import Role, Score, Span, Status, Trajectory
from forage_records.step_file import StepRow, step_file_path, write_step


def build_answer(uid: str, em: float | None, text: str = "") -> dict[str, Any]:
    spans = [
        {"role": "prompt", "text": f"Question: {uid}?"},
        {"role": "model", "text": "<search>q</search>"},
        {"role": "env", "text": "<information>d</information>"},
        {"role": "model", "text": f"<answer>{text}</answer>"},
    ]
    known = {"uid": uid, "question": f"what is {uid}", "targets": ["gold"], "spans": spans}
    return known | {"em": em, "reward": em, "answer": text, "failed": em is None}


def write_validation(run: Path, label: str, version: int, rows: Sequence[dict[str, Any]]) -> None:
    folder = run / "validation"
    folder.mkdir(exist_ok=True)
    summary = {"label": label, "version": version, "count": len(rows), "em": 0.5}
    (folder / f"{label}.json").write_text(json.dumps(summary))
    (folder / f"{label}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def client(tmp_path: Path) -> ConsoleClient:
    """A run whose question `nq/test/0` goes wrong, right, wrong; 1 stays right; a watched one has two samples."""
    run = tmp_path / "one"
    run.mkdir()
    write_run(run, {}, [])
    for label, version, em in (("before", 0, 0.0), ("step-10", 10, 1.0), ("after", 20, 0.0)):
        rows = [build_answer("nq/test/0/0", em, f"answer of {label}"), build_answer("nq/test/1/0", 1.0, "same")]
        write_validation(run, label, version, rows)
    for step, values in ((5, (0.0, 0.0)), (15, (1.0, None))):
        rows = [build_answer("nq/train/7/watch", em, f"watched at {step}") for em in values]
        write_validation(run, f"watch-{step}", step, rows)
    return ConsoleClient(tmp_path)


def test_questions_that_changed_most_come_first(client: ConsoleClient) -> None:
    found = client.read("/runs/one/questions")
    rows = [(row["uid"], row["changes"], row["is_watched"]) for row in found["rows"]]
    assert rows == [("nq/test/0", 2, False), ("nq/train/7", 1, True), ("nq/test/1", 0, False)]
    assert found["total"] == 3


def test_appearances_are_in_order_of_steps(client: ConsoleClient) -> None:
    rows = {row["uid"]: row for row in client.read("/runs/one/questions")["rows"]}
    first = rows["nq/test/0"]
    assert (first["question"], first["targets"], first["data_source"]) == ("what is nq/test/0/0", ["gold"], "nq")
    points = [(point["place"], point["row"], point["step"], point["kind"], point["em"]) for point in first["points"]]
    assert points == [
        ("before", 0, 0, "validation", 0.0),
        ("validation-step-10", 0, 10, "validation", 1.0),
        ("after", 0, 20, "validation", 0.0),
    ]
    watched = [(point["place"], point["em"], point["samples"]) for point in rows["nq/train/7"]["points"]]
    assert watched == [("watch-5", 0.0, 2), ("watch-15", 1.0, 2)], "a sample that failed is in no mean"


@pytest.mark.parametrize(
    ("query", "uids"),
    [
        ({"watched": True}, ["nq/train/7"]),
        ({"watched": False}, ["nq/test/0", "nq/test/1"]),
        ({"changed": True}, ["nq/test/0", "nq/train/7"]),
        ({"changed": False}, ["nq/test/1"]),
        ({"text": "ANSWER of step-10"}, ["nq/test/0"]),
        ({"text": "what train"}, ["nq/train/7"]),
        ({"source": "hotpotqa"}, []),
        ({"offset": 1, "limit": 1}, ["nq/train/7"]),
        ({"offset": 9}, []),
    ],
)
def test_filters_and_pages(client: ConsoleClient, query: dict[str, Any], uids: list[str]) -> None:
    assert [row["uid"] for row in client.read("/runs/one/questions", **query)["rows"]] == uids


@pytest.mark.parametrize("uid", ["nq/test/0", "nq/test/0/0", "nq/test/0/7"])
def test_a_question_has_its_texts(client: ConsoleClient, uid: str) -> None:
    found = client.read(f"/runs/one/questions/{uid}")
    assert found["question"]["uid"] == "nq/test/0"
    assert [text["point"]["place"] for text in found["texts"]] == ["before", "validation-step-10", "after"]
    blocks = found["texts"][1]["blocks"]
    turns = [(block["author"], block["turn"]) for block in blocks]
    assert turns == [("prompt", None), ("model", 1), ("env", 1), ("model", 2)]
    assert [piece["text"] for piece in blocks[3]["pieces"]] == ["<answer>", "answer of step-10", "</answer>"]
    assert found["em"] == {"mean": pytest.approx(1 / 3), "low": 0.0, "high": 1.0, "count": 3}


def test_a_question_that_nobody_asked_is_a_sentence(client: ConsoleClient) -> None:
    assert "has the question 'nq/test/9'" in client.read_problem("/runs/one/questions/nq/test/9", 404)


def test_odd_questions_are_found_by_their_own_name(client: ConsoleClient, tmp_path: Path) -> None:
    odd = ["a b?c#d%2F/x/1/0", "ünï/±/2/0", "<script>/x/3/0", "plain"]
    write_validation(tmp_path / "one", "step-12", 12, [build_answer(uid, 1.0) for uid in odd])
    for uid in odd:
        found = client.read(f"/runs/one/questions/{quote(uid, safe='')}")
        assert found["question"]["question"] == f"what is {uid}"


def test_what_is_no_span_is_left_out(client: ConsoleClient, tmp_path: Path) -> None:
    row = build_answer("nq/test/5/0", 1.0)
    for spans in (None, 5, [5, {"role": "system", "text": "x"}, {"role": "model"}, {"role": "model", "text": 5}]):
        write_validation(tmp_path / "one", "step-12", 12, [row | {"spans": spans}])
        assert client.read("/runs/one/questions/nq/test/5")["texts"][0]["blocks"] == []


def test_a_run_without_validations_has_no_questions(tmp_path: Path) -> None:
    (tmp_path / "young").mkdir()
    write_run(tmp_path / "young", {}, [])
    assert ConsoleClient(tmp_path).read("/runs/young/questions") == {"rows": [], "total": 0}


def build_row(step: int, sample: int, em: float) -> StepRow:
    score = Score(status=Status.STATUS_OK, total=em)
    trajectory = Trajectory(
        id=f"one/nq/train/7/{step}/{sample}",
        group_uid=f"nq/train/7/{step // 10}",
        data_source="nq",
        sample=sample,
        status=Status.STATUS_OK,
        score=score,
        validation_score=score,
        spans=[Span(role=Role.ROLE_PROMPT, text="p"), Span(role=Role.ROLE_MODEL, text=f"trained at {step}")],
    )
    return StepRow(trajectory, step, step - 1, trained=True)


def test_saved_steps_are_appearances_too(client: ConsoleClient, tmp_path: Path) -> None:
    for step, ems in ((10, (0.0, 1.0)), (20, (1.0, 1.0))):
        rows = [build_row(step, sample, em) for sample, em in enumerate(ems)]
        file = step_file_path(tmp_path / "one", step)
        write_step(file, "", rows)
    for uid in ("nq/train/7", "nq/train/7/1"):
        found = client.read(f"/runs/one/questions/{uid}")
        points = found["question"]["points"]
        assert [(one["place"], one["kind"], one["em"], one["samples"]) for one in points] == [
            ("watch-5", "watch", 0.0, 2),
            ("step-10", "train", 0.5, 2),
            ("watch-15", "watch", 1.0, 2),
            ("step-20", "train", 1.0, 2),
        ]
        assert [text["point"] for text in found["texts"]] == points
        assert found["texts"][3]["blocks"][-1]["pieces"][0]["text"] == "trained at 20"


def test_a_question_that_was_only_trained_on_is_found(client: ConsoleClient, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "one/validation")
    write_step(step_file_path(tmp_path / "one", 10), "", [build_row(10, 0, 1.0)])
    found = client.read("/runs/one/questions/nq/train/7/1")
    assert (found["question"]["uid"], len(found["texts"])) == ("nq/train/7", 1)
    (tmp_path / "one/trajectories/step-000010.parquet").write_bytes(b"half")
    assert "has the question" in client.read_problem("/runs/one/questions/nq/train/7/1", 404)


def test_validations_after_a_step_have_places_of_their_own(client: ConsoleClient, tmp_path: Path) -> None:
    write_step(step_file_path(tmp_path / "one", 10), "", [build_row(10, 0, 1.0)])
    found = client.read("/runs/one/questions/nq/test/0")
    place = found["question"]["points"][1]["place"]
    assert place == "validation-step-10"
    assert client.read(f"/runs/one/trajectories/{place}/0")["summary"]["uid"] == "nq/test/0/0"
    assert client.read("/runs/one/trajectories/step-10/0")["summary"]["uid"] == "nq/train/7/1"
