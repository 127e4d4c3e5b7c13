"""`forage probe` that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from completions_server import CompletionsServer
from probe_parts import (
    FORAGE,
    REPOSITORY,
    answer_thoughtfully,
    build_trajectory,
)
from waiting import wait_until

from forage_cli.commands.probe import probe
from forage_cli.runs.journal import Journal
from forage_proto.v1.probe_pb2 import Probed
from forage_proto.v1.trajectory_pb2 import Status, Trajectory
from forage_records.trajectory_file import TrajectoryWriter
from forage_runtime.errors import UserError


def write_trajectories(file: Path, count: int) -> Path:
    with TrajectoryWriter(file, "<|im_end|>") as writer:
        for number in range(count):
            writer.write(build_trajectory(number, right=number % 2 == 0))
        writer.write(Trajectory(id="run/lost", status=Status.STATUS_TIMEOUT, status_detail="it hung"))
    return file


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
        wait_until(lambda: journal.exists() and journal.stat().st_size > 800)
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
