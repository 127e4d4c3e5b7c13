"""`forage rollout replay` as a user runs it, with the reward service that it starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from forage_cli.terminal.trajectories import render_comparison
from forage_proto.v1.trajectory_pb2 import GroundTruth, Role, Score, Span, Status, Trajectory
from forage_records.replay import Change, Comparison
from forage_records.trajectory_file import TrajectoryWriter, read_trajectories

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()", "rollout"]
ANSWERS = ("Oslo", "Rome", "Oslo")


def run_forage(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FORAGE, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Three trajectories, of which the reward gave 0.25 to each; and one that never got so far."""
    file = tmp_path / "stored.parquet"
    with TrajectoryWriter(file, "<|im_end|>") as writer:
        for number, answer in enumerate(ANSWERS):
            spans = [
                Span(role=Role.ROLE_PROMPT, text="Capital of Norway?"),
                Span(role=Role.ROLE_MODEL, text=f"<answer> {answer} </answer><|im_end|>"),
            ]
            writer.write(
                Trajectory(
                    id=f"run/q/{number}",
                    data_source="world_facts",
                    spans=spans,
                    ground_truth=GroundTruth(targets=["Oslo"]),
                    status=Status.STATUS_OK,
                    score=Score(status=Status.STATUS_OK, total=0.25),
                )
            )
        writer.write(Trajectory(id="run/q/lost", status=Status.STATUS_TIMEOUT))
    return file


def test_stored_trajectories_are_rescored_and_the_same_command_continues(
    stored: Path, free_base_port: Callable[[], int], tmp_path: Path
) -> None:
    common = [stored.name, "--rescore", "-o", "new.parquet", "--base-port", str(free_base_port())]
    common += ["reward.routes.world_facts.name=em", "run.dir=runs"]
    ended = run_forage("replay", *common, "--limit", "2", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 trajectories in new.parquet" in ended.stdout
    # They are stored as they come back, in any order.
    assert {t.id: t.score.total for t in read_trajectories(tmp_path / "new.parquet")} == {
        "run/q/0": 1.0,
        "run/q/1": 0.0,
    }
    ended = run_forage("replay", *common, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "3 trajectories in new.parquet" in ended.stdout
    assert "1 were never scored and are left out" in ended.stdout
    assert "0.2500 → 1.0000  run/q/2" in ended.stdout  # the one of this run
    new = read_trajectories(tmp_path / "new.parquet")
    assert sorted((t.id, t.score.total, t.score.reward) for t in new) == [
        ("run/q/0", 1.0, "em"),
        ("run/q/1", 0.0, "em"),
        ("run/q/2", 1.0, "em"),
    ]
    assert [t.score.total for t in read_trajectories(stored)] == [0.25, 0.25, 0.25, 0.0]  # what was stored is untouched


def test_invalid_requests_end_with_one_sentence_and_exit_code_2(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("PAR?")
    for arguments, sentence in (
        (["stored.parquet"], "give one of --rescore and --rerun"),
        (["stored.parquet", "--rescore", "--rerun"], "give one of --rescore and --rerun"),
        (["bad.parquet", "--rescore"], "bad.parquet cannot be read as Parquet"),
        (["stored.parquet", "--rescore", "-o", "bad.parquet"], "bad.parquet cannot be read as Parquet"),
        (["stored.parquet", "--rescore", "reward.rutes=1"], "rutes"),
    ):
        ended = run_forage("replay", *arguments, cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (2, ""), arguments
        assert sentence in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_comparison_names_what_changed_most() -> None:
    comparison = Comparison(total=10)
    comparison.diverged[""] = 10
    comparison.statuses["STATUS_OK", "STATUS_TIMEOUT"] = 1
    comparison.metrics["score"] = Change(count=9, before=1.8, after=5.4, changed=8)
    comparison.largest.append((0.8, "run/world/test/8/0/3", 0.2, 1.0, "because"))
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_comparison(comparison, rerun=True))
    text = console.export_text()
    assert "identical 10 of 10" in text
    assert "0.2000 → 1.0000  run/world/test/8/0/3  because" in text
    assert "1 went from STATUS_OK to STATUS_TIMEOUT" in text
