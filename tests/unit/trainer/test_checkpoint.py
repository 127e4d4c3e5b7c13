"""Checkpoints: complete or absent, whatever moment the process dies at."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from limits import WAIT_S
from trainer_parts import save_checkpoint

from forage_queue.trainer.batcher import ConsumedGroup, ConsumedStep
from forage_runtime.errors import DataError, DiskFullError, FencedError, UserError
from forage_runtime.files.folders import remove_folder, remove_leftovers, stage_folder
from forage_trainer.checkpoints import checkpoint
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.manifest import Manifest, read_checkpoint
from forage_trainer.folder_digests import describe_rank
from forage_trainer.reporting.progress import MetricsFile
from forage_weights.digests import compute_digest

CONSUMED = (ConsumedStep(3, 2, (ConsumedGroup(3, 0, 1, "s/train/7/0", "17-1"),)),)


class Died(BaseException):
    """Stands for kill -9: nothing after it runs in the code under test but clean-up, which the next start repeats."""


def make_writer(text: str, then: BaseException | None = None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights.pt").write_text(text)
        if then is not None:
            raise then

    return write


def save(checkpoints: Checkpoints, step: int, then: BaseException | None = None) -> Path:
    return save_checkpoint(checkpoints, step, make_writer(f"weights {step}", then), consumed=CONSUMED)


def test_a_checkpoint_is_read_as_it_was_saved(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, 2, 10), 5)
    result = Checkpoints(tmp_path, 2, 10).find_newest()
    assert result is not None
    state, manifest = result
    assert (state / "weights.pt").read_text() == "weights 5"
    assert (manifest.step, manifest.epoch, manifest.data, manifest.figures) == (5, 2, "data", {"step": 5})
    assert manifest.consumed == CONSUMED
    assert (tmp_path / "latest").read_text() == "step_5\n"


@pytest.mark.parametrize("error", [Died(), OSError(errno.EIO, "broken")])
def test_an_interrupted_save_leaves_the_previous_checkpoint(tmp_path: Path, error: BaseException) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    save(checkpoints, 5)
    with pytest.raises(type(error)):
        save(checkpoints, 6, error)
    result = Checkpoints(tmp_path, 2, 10).find_newest()
    assert result is not None
    assert result[1].step == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_5"]


def test_partial_files_of_a_killed_process_are_removed_at_the_next_start(tmp_path: Path) -> None:
    half = tmp_path / ".partial-step_6"
    (half / "state").mkdir(parents=True)
    (half / "state/weights.pt").write_text("half")
    assert Checkpoints(tmp_path, 2, 10).find_newest() is None
    assert not half.exists()


def test_a_process_killed_between_rename_and_latest_still_has_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 3, 10)
    save(checkpoints, 5)
    save(checkpoints, 6)
    (tmp_path / "latest").write_text("step_5\n")
    result = checkpoints.find_newest()
    assert result is not None
    assert result[1].step == 6


@pytest.mark.parametrize("damage", ["weights", "manifest", "digest"])
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    save(checkpoints, 5)
    path = save(checkpoints, 6)
    without = json.dumps(json.loads((path / "manifest.json").read_text()) | {"files": {"weights.pt": None}})
    file = path / ("state/weights.pt" if damage == "weights" else "manifest.json")
    file.write_text(without if damage == "digest" else "rotten")
    result = checkpoints.find_newest()
    assert result is not None
    assert result[1].step == 5


class Counter:
    """A part with a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_parts_are_restored_and_new_ones_start_anew(tmp_path: Path) -> None:
    parts = {"kl": Counter(7), "gone": Counter(8)}
    save_checkpoint(Checkpoints(tmp_path, 2, 10), 5, make_writer("w"), parts=parts)
    result = Checkpoints(tmp_path, 2, 10).find_newest()
    assert result is not None
    kl, new = Counter(0), Counter(1)
    result[1].restore_parts({"kl": kl, "new": new})
    assert (kl.count, new.count) == (7, 1)


def test_a_checkpoint_is_complete_when_the_files_of_every_process_are_visible(tmp_path: Path) -> None:
    late: list[Callable[[], object]] = []

    def write(ranks: int, comes_late: int = 0) -> Callable[[Path], None]:
        def put(folder: Path, rank: int) -> None:
            for kind in ("actor/model/part", "actor/optimizer/part"):
                (folder / f"{kind}_rank_{rank}.safetensors").write_text(kind)

        def write_shards(folder: Path) -> None:
            for kind in ("actor/model", "actor/optimizer"):
                (folder / kind).mkdir(parents=True)
            for rank in range(ranks):
                put(folder, rank)
            for rank in range(ranks, ranks + comes_late):
                late.extend([partial(put, folder, rank), partial(describe_rank, folder, rank)])
            for rank in range(1, ranks):
                describe_rank(folder, rank)

        return write_shards

    patient = Checkpoints(tmp_path, 2, 10, world_size=3, listing_timeout_s=WAIT_S, pause=lambda _: late.pop(0)())
    manifest = read_checkpoint(save_checkpoint(patient, 1, write(2, comes_late=1)))
    assert len(manifest.files) == 6, "the last process's files came late"
    assert late == [], "and then their digests"
    assert not list((tmp_path / "step_1/state").glob("digests*"))
    strict = Checkpoints(tmp_path, 2, 10, world_size=3, listing_timeout_s=0)
    with pytest.raises(UserError, match=r"2 of 6 files .*actor/model/part_rank_2\.safetensors.*run\.dir must be"):
        save_checkpoint(strict, 2, write(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]


def test_every_rank_digests_its_own_files_and_rank_0_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def compute(file: Path) -> str:
        read.append(file.name)
        return compute_digest(file)

    def write(folder: Path) -> None:
        (folder / "critic").mkdir()
        for rank in range(3):
            for name in (f"part_rank_{rank}.safetensors", f"critic/random_rank_{rank}.json"):
                (folder / name).write_text(name)
        (folder / "config.json").write_text("{}")
        describe_rank(folder, 1)
        monkeypatch.setattr("forage_trainer.folder_digests.compute_digest", compute)

    path = save_checkpoint(Checkpoints(tmp_path, 2, 10, world_size=3, listing_timeout_s=0.1, pause=int), 1, write)
    assert sorted(read) == [
        "config.json",
        *(f"part_rank_{rank}.safetensors" for rank in (0, 2)),
        *(f"random_rank_{rank}.json" for rank in (0, 2)),
    ]
    manifest = read_checkpoint(path)
    assert {name: compute_digest(path / "state" / name) for name in manifest.files} == manifest.files
    assert len(manifest.files) == 7
    (path / "state/critic/random_rank_1.json").write_text("altered")
    with pytest.raises(DataError, match=r"critic/random_rank_1\.json changed"):
        read_checkpoint(path)


def test_a_checkpoint_with_digests_of_sha256_is_verified(tmp_path: Path) -> None:
    path = save(Checkpoints(tmp_path, 2, 10), 5)
    tree = json.loads((path / "manifest.json").read_text())
    assert all(digest.startswith("blake3:") for digest in tree["files"].values())
    tree["files"] = {name: hashlib.sha256((path / "state" / name).read_bytes()).hexdigest() for name in tree["files"]}
    (path / "manifest.json").write_text(json.dumps(tree))
    assert read_checkpoint(path).files == tree["files"]
    (path / "state" / next(iter(tree["files"]))).write_text("altered")
    with pytest.raises(DataError, match="is damaged"):
        read_checkpoint(path)


def test_a_checkpoint_without_parts_is_read(tmp_path: Path) -> None:
    path = save(Checkpoints(tmp_path, 2, 10), 5)
    tree = json.loads((path / "manifest.json").read_text())
    del tree["world_size"], tree["parts"]
    (path / "manifest.json").write_text(json.dumps(tree))
    manifest = Manifest.read(path / "manifest.json")
    assert (manifest.world_size, manifest.parts, manifest.consumed) == (1, {}, CONSUMED)


def test_an_incomplete_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is no complete checkpoint"):
        read_checkpoint(tmp_path / "nothing")
    path = save(Checkpoints(tmp_path, 2, 10), 5)
    (path / "state/weights.pt").write_text("rotten")
    with pytest.raises(DataError, match=r"step_5 is damaged \(weights.pt"):
        read_checkpoint(path)


def test_the_best_checkpoint_stays_until_another_is_better(tmp_path: Path) -> None:
    checkpoints, scores = Checkpoints(tmp_path, 1, 10), {0: 0.9}  # of step 0 there is no checkpoint
    stay: dict[int, set[str]] = {}
    for step, score in ((5, 0.3), (10, 0.5), (15, 0.5), (20, 0.4), (25, 0.6), (30, 0.1)):
        save(checkpoints, step)
        scores[step] = score
        checkpoints.mark_best(scores)
        stay[step] = {p.name for p in tmp_path.glob("step_*")}
    assert stay == {
        5: {"step_5"},
        10: {"step_5", "step_10"},  # step 5 goes with the next save
        15: {"step_10", "step_15"},
        20: {"step_10", "step_20"},
        25: {"step_10", "step_25"},
        30: {"step_25", "step_30"},
    }
    assert (tmp_path / "best").read_text() == "step_25\n"
    assert (tmp_path / "latest").read_text() == "step_30\n"
    result = Checkpoints(tmp_path, 1, 10).find_newest()
    assert result is not None
    assert result[1].step == 30


def test_latest_never_names_an_incomplete_checkpoint(tmp_path: Path) -> None:
    """The process dies at each operation on the disk in turn; then the next one reads."""
    seen: set[tuple[int, str]] = set()
    for number in range(200):
        folder = tmp_path / str(number)
        checkpoints = Checkpoints(folder, 1, 10)
        save(checkpoints, 5)
        with fail_disk_at(number) as died:
            save(checkpoints, 6)
        named = (folder / "latest").read_text().strip()
        assert read_checkpoint(folder / named).step in (5, 6)
        result = Checkpoints(folder, 1, 10).find_newest()
        assert result is not None
        seen.add((result[1].step, named))
        again = Checkpoints(folder, 1, 10)
        save(again, 6)
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_6"]
        if not died:
            break
    assert seen == {(5, "step_5"), (6, "step_5"), (6, "step_6")}
    assert number > 8


DISK = [
    (os, "mkdir"), (os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "open"),
    (Path, "write_text"),
]  # fmt: skip


@contextmanager
def fail_disk_at(number: int) -> Iterator[list[bool]]:
    """Every operation on the disk from the `number`-th on raises: nothing more happens, clean-up included."""
    left, died = [number], []

    def make_failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                died.append(True)
                raise Died
            return real(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in DISK:
            patch.setattr(owner, name, make_failing(getattr(owner, name)))
        with suppress(Died):
            yield died


def test_a_removed_folder_is_never_partially_visible(tmp_path: Path) -> None:
    def fill() -> Path:
        with stage_folder(tmp_path / "a") as folder:
            for name in "bcd":
                (folder / name).write_text(name)
        return tmp_path / "a"

    for number in range(20):
        folder = fill()
        with fail_disk_at(number) as died:
            remove_folder(folder)
        assert [p.name for p in sorted(folder.glob("*"))] in ([], ["b", "c", "d"])
        remove_leftovers(tmp_path)
        if not died:
            break
    assert number > 3
    assert not folder.exists()
    remove_folder(folder)


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    for step in (5, 9, 10, 15):
        save(checkpoints, step)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_10", "step_15"]


def test_without_disk_space_nothing_is_written_and_the_error_has_the_sizes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, parameters=1000, free_bytes=lambda _: 15_999)
    with pytest.raises(DiskFullError, match=rf"{tmp_path} needs 16000 bytes and has 15999 bytes free"):
        save(checkpoints, 5)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_writing_is_named_with_its_free_space(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    with pytest.raises(DiskFullError, match=r"step_5 cannot be written: its disk has \d+ bytes free"):
        save(checkpoints, 5, OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []


def test_a_staged_folder_is_complete_or_absent(tmp_path: Path) -> None:
    with stage_folder(tmp_path / "a") as folder:
        (folder / "one").write_text("1")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a/one").read_text() == "1"


def test_metrics_of_steps_after_a_checkpoint_are_deleted(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        metrics.append({"step": step, "kl": float("nan")})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "re')
    metrics.rewind(2)
    metrics.append_missing({"step": 2})
    metrics.append_missing({"step": 3, "again": True})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "kl": None}, {"step": 2, "kl": None}, {"step": 3, "again": True}]


def test_a_checkpoint_is_made_durable_beside_the_next_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, digests = threading.Event(), checkpoint.compute_digests

    def compute_late(folder: Path) -> dict[str, str]:
        assert goes_on.wait(WAIT_S)
        return digests(folder)

    monkeypatch.setattr(checkpoint, "compute_digests", compute_late)
    checkpoints = Checkpoints(tmp_path, 2, 10)
    checkpoints.begin(5, 2, "data", CONSUMED, {}, make_writer("state of step 5"))
    assert checkpoints.poll() is None
    assert checkpoints.find_newest() is None, "nothing is visible before it is durable"
    with pytest.raises(RuntimeError, match="was not waited for"):
        checkpoints.begin(6, 2, "data", CONSUMED, {}, make_writer("state of step 6"))
    goes_on.set()
    path = checkpoints.wait()
    assert path is not None
    assert read_checkpoint(path).consumed == CONSUMED
    assert checkpoints.wait() is None, "each is returned once"


def test_an_end_waits_for_the_checkpoint_and_a_failed_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    checkpoints.begin(5, 2, "data", CONSUMED, {}, make_writer("w"))
    checkpoints.close()
    assert Checkpoints(tmp_path, 2, 10).find_newest() is not None

    def fill_up(folder: Path) -> dict[str, str]:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(checkpoint, "compute_digests", fill_up)
    checkpoints.begin(6, 2, "data", CONSUMED, {}, make_writer("w"))
    with pytest.raises(DiskFullError, match="step_6 cannot be written"):
        checkpoints.wait()
    checkpoints.begin(7, 2, "data", CONSUMED, {}, make_writer("w"))
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_5"]


def test_a_checkpoint_that_is_not_confirmed_replaces_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    save(checkpoints, 5)

    def refuse() -> None:
        raise FencedError("a later trainer has taken over")

    checkpoints.begin(5, 1, "data", CONSUMED, {}, make_writer("of the earlier trainer"), confirm=refuse)
    with pytest.raises(FencedError):
        checkpoints.wait()
    assert (tmp_path / "step_5/state/weights.pt").read_text() == "weights 5"
    checkpoints.begin(6, 1, "data", CONSUMED, {}, make_writer("of the earlier trainer"), confirm=refuse)
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_5"]


def test_an_unforeseen_error_of_a_checkpoint_does_not_hide_the_one_that_ends_the_run(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    checkpoints.begin(5, 2, "data", CONSUMED, {"no": {1, 2}}, make_writer("w"))  # JSON has no sets
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []
