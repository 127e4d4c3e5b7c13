"""The command `forage probe`: it goes on after a kill, samples once, and refuses invalid requests."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from completions_server import CompletionsServer
from evaluation_services import write_questions
from probe_parts import (
    FORAGE,
    REPOSITORY,
    answer_thoughtfully,
    build_trajectory,
)

from forage_cli.commands.probe import probe
from forage_cli.runs.journal import Journal
from forage_common.errors import UserError
from forage_common.v1.probe_pb2 import Probed
from forage_common.v1.trajectory_pb2 import Status, Trajectory
from forage_records.trajectory_file import TrajectoryWriter, read_trajectories


def write_trajectories(file: Path, count: int) -> Path:
    with TrajectoryWriter(file, "<|im_end|>") as writer:
        for number in range(count):
            writer.write(build_trajectory(number, right=number % 2 == 0))
        writer.write(Trajectory(id="run/lost", status=Status.STATUS_TIMEOUT, status_detail="it hung"))
    return file


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_command_continues_after_kill_9_and_loses_no_finished_probe(
    overrides: list[str],
    scripted: CompletionsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_trajectories(tmp_path / "stored.parquet", 12)
    command = [*FORAGE, file.name, "--points", "4", "--samples", "8", *overrides]
    scripted.policy, scripted.delay_s = answer_thoughtfully, 0.15
    journal = tmp_path / "stored-probe" / "journal.bin"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: journal.exists() and journal.stat().st_size > 800)
        process.send_signal(signal.SIGKILL)
    (tmp_path / "copy.bin").write_bytes(journal.read_bytes())
    with Journal(tmp_path / "copy.bin", Probed) as copy:
        finished = list(copy.read())
    assert 0 < len(finished) < 12
    before = len(scripted.asked)
    assert 0 < before < 60
    scripted.delay_s = 0.0
    monkeypatch.chdir(tmp_path)
    again = partial(probe, [file.name, *overrides], points=4)
    again(samples=8)
    with Journal(journal, Probed) as whole:
        assert list(whole.read())[: len(finished)] == finished
    assert len(scripted.asked) <= 60 + 4 * 5  # at most those that were in flight were begun again
    folder = tmp_path / "stored-probe"
    kept = [row["trajectory"] for row in pq.read_table(folder / "probes.parquet").to_pylist()]
    assert kept == [f"run/world_facts/test/{number}/0/0" for number in range(12)] + ["run/lost"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["probes"], summary["failed"], summary["sets"]["correct"]["count"]) == (13, 1, 6)
    said = " ".join(capsys.readouterr().out.split())
    assert "13 probes in stored-probe; report" in said
    assert "1 could not be probed: its status is TIMEOUT: it hung" in said
    page = (folder / "report.html").read_text()
    assert (page.count("<svg"), page.count("<mark"), page.count("40 tokens kept: 8 of 8 right")) == (2, 12 * 5, 12)
    # Nothing is left: the same command asks nobody, and other samples need another folder.
    asked = len(scripted.asked)
    again(samples=8)
    assert len(scripted.asked) == asked
    with pytest.raises(UserError, match="holds probes with samples 8, now it is 9"):
        again(samples=9)
    scripted.digest = "second"
    journal.write_bytes((tmp_path / "copy.bin").read_bytes())
    with pytest.raises(UserError, match="holds probes with policy first@3, now it is second@3"):
        again(samples=8)
    assert len(scripted.asked) == asked
    with pytest.raises(UserError, match="services are already running"):
        again(samples=8, policy=str(REPOSITORY / "models/tiny-policy"))


def test_fresh_trajectories_are_sampled_once(
    overrides: list[str],
    scripted: CompletionsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_questions(tmp_path / "questions.parquet", "world_facts")
    scripted.trajectory = lambda prompt: build_trajectory(0, id=f"{prompt.run_id}/{prompt.group_uid}/0")
    again = partial(probe, overrides, questions=file, points=2, samples=2, out=Path("found"))
    again(limit=2)
    assert len(scripted.prompts) == 2
    again()  # the other three
    assert sorted(prompt.group_uid for prompt in scripted.prompts) == [f"world_facts/test/{n}/0" for n in range(5)]
    assert {prompt.samples for prompt in scripted.prompts} == {1}
    assert len({prompt.sampling.seed for prompt in scripted.prompts}) == 5
    assert len(scripted.asked) == 5 * 3
    assert "5 probes in found" in capsys.readouterr().out
    assert [one.id for one in read_trajectories(tmp_path / "found" / "trajectories.parquet")] == [
        f"probe/world_facts/test/{number}/0/0" for number in range(5)
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name one file of trajectories"),
        (["a.parquet", "--questions", "b.parquet"], "name one file of trajectories"),
        (["missing.parquet"], "missing.parquet cannot be read"),
        (["bad.parquet"], "bad.parquet cannot be read as Parquet"),
        (["bad.parquet", "rollout.pots=1"], "rollout.pots"),
    ],
)
def test_invalid_requests_end_with_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.parquet").write_text("PAR?")
    options = iter(arguments)
    words = [word for word in options if word != "--questions" or not next(options)]
    questions = Path(arguments[2]) if "--questions" in arguments else None
    with pytest.raises(UserError, match=re.escape(sentence)):
        probe(words, questions=questions, config=None)
    assert list(islice(tmp_path.glob("*-probe"), 1)) == []
