"""Commands that read trajectories read the files that the others wrote, or say in a sentence which they read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from step_runs import END

from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    ChatMessage,
    GroundTruth,
    Role,
    Score,
    Span,
    Status,
    Trajectory,
    Turn,
)
from forage_records.questions import Question
from forage_records.run_folder import RunFolder
from forage_records.step_file import Fate, GroupFate, StepRow, step_file_path, write_step
from forage_records.trajectory_file import TrajectoryWriter
from forage_records.trajectory_rows import build_record
from forage_runtime.settings import Settings

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]
ANSWERS = {"Oslo": 1.0, "Rome": 0.3}
"""What the policy said about the capital of Norway → its reward by search_r1_format."""


def build(number: int, answer: str, reward: float) -> Trajectory:
    turns = [
        Turn(
            index=1,
            action=ActionKind.ACTION_KIND_SEARCH,
            content="q",
            executed=True,
            retrieval_status=Status.STATUS_OK,
            tag="search",
        ),
        Turn(index=2, action=ActionKind.ACTION_KIND_ANSWER, content=answer, tag="answer"),
    ]
    texts = [
        (Role.ROLE_PROMPT, "What is the capital of Norway?\n"),
        (Role.ROLE_MODEL, "<think> t </think> <search> q </search>"),
        (Role.ROLE_ENV, "\n\n<information>Oslo is in Norway.</information>\n\n"),
        (Role.ROLE_MODEL, f"<think> t </think> <answer> {answer} </answer>{END}"),
    ]
    return Trajectory(
        id=f"run/world_facts/test/{number}/0/0",
        group_uid=f"world_facts/test/{number}/0",
        data_source="world_facts",
        token_ids=range(7),
        prompt_length=1,
        loss_mask=[1, 1, 0, 0, 1, 1],
        turn_ids=[1, 1, -1, -1, 2, 2],
        logprobs=[-1.0, -1.0, 0.0, 0.0, -1.0, -1.0],
        spans=[Span(role=role, text=text) for role, text in texts],
        turns=turns,
        score=Score(status=Status.STATUS_OK, total=reward, reward="search_r1_format"),
        validation_score=Score(status=Status.STATUS_OK, total=float(reward == 1)),
        ground_truth=GroundTruth(targets=["Oslo"]),
        finished=True,
        valid_searches=1,
        status=Status.STATUS_OK,
    )


BUILT = [build(number, answer, reward) for number, (answer, reward) in enumerate(ANSWERS.items())]


def write_samples(run: Path) -> Path:
    """As `forage rollout sample`, a replay, an evaluation or a probe does."""
    with TrajectoryWriter(run / "trajectories.parquet", END) as writer:
        for trajectory in BUILT:
            writer.write(trajectory)
    return run / "trajectories.parquet"


def write_training_step(run: Path) -> Path:
    fates = [GroupFate(one.group_uid, place, 0, Fate.TRAINED) for place, one in enumerate(BUILT)]
    write_step(step_file_path(run, 3), END, [StepRow(one, 3, 2, True) for one in BUILT], fates)
    return step_file_path(run, 3)


def write_validation(run: Path) -> Path:
    truth = GroundTruth(targets=["Oslo"])
    messages = (ChatMessage(role="user", content="What is the capital of Norway?"),)
    questions = [Question("world_facts", "test", number, messages, truth, "Capital?") for number in range(len(BUILT))]
    rows = [build_record(question, one, END) for question, one in zip(questions, BUILT, strict=True)]
    (run / "validation").mkdir()
    file = run / "validation/after.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


WRITERS = {"samples": write_samples, "a step": write_training_step, "a validation": write_validation}


@pytest.fixture(params=WRITERS.values(), ids=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write: Callable[[Path], Path] = request.param
    (tmp_path / "settings.yaml").write_text(Settings().to_yaml())
    return write(tmp_path)


def run_forage(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FORAGE, *arguments], capture_output=True, text=True, timeout=600, cwd=cwd)


def test_scores_are_those_that_the_run_gave_and_are_no_validation(written: Path, tmp_path: Path) -> None:
    before = RunFolder(tmp_path).list_validations()
    routes = tmp_path / "routes.yaml"
    routes.write_text("reward: {routes: {world_facts: {name: search_r1_format}}}\n")
    ended = run_forage("reward", "score", str(written), "-c", str(routes), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    scores = [json.loads(line) for line in written.with_suffix(".scores").read_text().splitlines()]
    assert [row["total"] for row in scores] == pytest.approx([*ANSWERS.values()])
    assert [row["data_source"] for row in scores] == ["world_facts"] * len(ANSWERS)
    assert RunFolder(tmp_path).list_validations() == before


def test_a_row_is_explained(written: Path, tmp_path: Path) -> None:
    for line, (answer, reward) in enumerate(ANSWERS.items(), 1):
        command = ["reward", "explain", str(written), "--reward", "search_r1_format", "--line", str(line)]
        ended = run_forage(*command, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert answer in ended.stdout
        (total,) = (row for row in ended.stdout.splitlines() if row.startswith("│ total"))
        assert f" {reward:g} " in total
    ended = run_forage("reward", "explain", str(written), "--reward", "em", "--line", "9", cwd=tmp_path)
    assert (ended.returncode, "it has 2 rows: --line 9 is none of them" in ended.stderr) == (2, True)


def test_it_is_scored_again_or_refused_in_a_sentence(
    written: Path, tmp_path: Path, free_base_port: Callable[[], int]
) -> None:
    ports = ["--base-port", str(free_base_port())]
    ended = run_forage("rollout", "replay", str(written), "--rescore", *ports, cwd=tmp_path)
    if written.suffix == ".parquet":
        assert ended.returncode == 0, ended.stderr
        assert "Traceback" not in ended.stderr
        return
    assert ended.returncode == 2
    assert "after.jsonl cannot be read as Parquet" in ended.stderr
    assert "give a file of 'forage rollout sample' or of a run" in ended.stderr


def test_its_run_shows_it(written: Path, tmp_path: Path) -> None:
    label = ["--step", "3"] if "trajectories" in written.parts else ["--label", "after"]
    ended = run_forage("trajectories", str(tmp_path), *label, cwd=tmp_path)
    if written.parent == tmp_path:
        assert ended.returncode == 2, "samples are of no run"
        return
    assert ended.returncode == 0, ended.stderr
    for answer in ANSWERS:
        assert answer in ended.stdout
