"""A full disk: every file of a run is whole or as before, and is written once there is room."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from arrived_groups import arrive
from full_disk import SmallDisk, small_disk
from trainer_parts import make_group
from waiting import WAIT_S, wait_until

from forage_queue.streams.client import Entry
from forage_queue.trainer.batcher import Batch
from forage_queue.trainer.replay_groups import ReplayGroups
from forage_runtime.errors import DiskFullError
from forage_runtime.files.folders import write_json
from forage_runtime.retries import DISK_PATIENCE_S, DiskRetry
from forage_runtime.settings import load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.data.tensors import SELECTED_NONE
from forage_trainer.reporting.progress import MetricsFile, Phase, StateFile
from forage_trainer.reporting.trajectories import StepFiles, StepRecord
from forage_trainer.validation.answers import StoredAnswers

__all__ = ["small_disk"]
GROUPS = [arrive(make_group(f"q/{n}", [0.0, 1.0] * 8, position=n)) for n in range(16)]
BATCH = Batch(3, tuple(Entry(b"1-0", group) for group in GROUPS), 0)
LONG = "x" * 50_000
MODEL = Path(__file__).parents[3] / "models/tiny-policy"


def save_checkpoint(folder: Path) -> Any:
    checkpoints = Checkpoints(folder, 2, 10, free_bytes=lambda _: 2**30)
    checkpoints.begin(3, 1, "", (), {}, lambda path: torch.save(torch.zeros(200_000), path / "w.pt"))
    return checkpoints.wait()


def write_step_file(folder: Path) -> Any:
    settings = load_settings(None, [f"run.dir={folder}", "run.id=r", f"model.path={MODEL}"], {})
    return StepFiles(settings).write(3, (), StepRecord(BATCH, SELECTED_NONE, 2))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "json": lambda folder: write_json(folder / "rollbacks.json", LONG),
    "metrics": lambda folder: MetricsFile(folder).append({"step": 2, "text": LONG}),
    "kept groups": lambda folder: ReplayGroups(folder).write(BATCH),
    "answers": lambda folder: StoredAnswers(folder, "after", 1).append(GROUPS),
    "checkpoint": save_checkpoint,
    "step file": write_step_file,
}


def read_files(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "ballast")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.stat().st_size}


@pytest.mark.parametrize("name", WRITERS)
def test_what_has_no_room_leaves_nothing_and_is_written_later(small_disk: SmallDisk, name: str) -> None:
    write, folder = WRITERS[name], small_disk.path
    MetricsFile(folder).append({"step": 1})
    before = read_files(folder)
    small_disk.fill()
    with pytest.raises(DiskFullError, match=rf"{folder}.* cannot be written: its disk has \d+ bytes free"):
        write(folder)
    visible = {path: data for path, data in read_files(folder).items() if "step-000003" not in path}
    assert visible == before
    small_disk.free()
    write(folder)
    assert len(read_files(folder)) > len(before) or name == "metrics"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == ([1, 2] if name == "metrics" else [1])


def test_the_state_of_a_view_does_not_hold_up_the_run(small_disk: SmallDisk) -> None:
    state = StateFile(small_disk.path)
    small_disk.fill()
    state.set(Phase.TRAINING, LONG)
    small_disk.free()
    state.set(Phase.TRAINING, LONG)
    assert json.loads((small_disk.path / "state.json").read_text())["detail"] == LONG


def test_a_write_waits_for_room_and_says_so(small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forage_runtime.retries._DISK_INTERVAL_S", 0.05)
    health, file = Health(), small_disk.path / "a.json"
    small_disk.fill()
    writer = threading.Thread(target=lambda: DiskRetry(Stop(), health)(lambda: write_json(file, LONG)))
    writer.start()
    assert f"{file} cannot be written: its disk has 0 bytes free" in wait_until(lambda: health.waiting.get("disk", ""))
    small_disk.free()
    writer.join(WAIT_S)
    assert json.loads(file.read_text()) == LONG
    assert "disk" not in health.waiting


def test_a_disk_that_stays_full_ends_the_wait(small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forage_runtime.retries._DISK_INTERVAL_S", 0.02)
    monkeypatch.setattr("forage_runtime.retries.DISK_PATIENCE_S", 0.1)
    small_disk.fill()
    with pytest.raises(DiskFullError) as result:
        DiskRetry(Stop(), Health())(lambda: write_json(small_disk.path / "a.json", LONG))
    assert result.value.exit_code == 1, "the supervisor starts it again"


def test_a_write_that_took_long_before_the_disk_was_full_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, attempts = [1.0], []
    monkeypatch.setattr("forage_runtime.retries.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr("forage_runtime.retries._DISK_INTERVAL_S", 0.0)

    def write() -> int:
        attempts.append(1)
        if len(attempts) == 1:
            seconds[0] += 10 * DISK_PATIENCE_S
            raise DiskFullError("no room")
        return len(attempts)

    assert DiskRetry(Stop(), Health())(write) == 2
