"""Checkpoints that only the trainer can have written: nothing else is resumed from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from key_pairs import make_keys, make_signatures
from structlog.testing import capture_logs
from trainer_parts import save_checkpoint

from forage_runtime.errors import DataError, UserError
from forage_runtime.security.signatures import RunSignatures, SignatureError
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.export import export_policy, find_checkpoint
from forage_trainer.checkpoints.manifest import MANIFEST, SIGNATURE, read_checkpoint


def write(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model/weights.pt").write_text("weights")
    (folder / "optimizer.pt").write_text("moments")


def open_checkpoints(folder: Path, **settings: Any) -> Checkpoints:
    return Checkpoints(folder / "run/checkpoints", 3, 10, signatures=make_signatures(folder / "keys", **settings))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(open_checkpoints(tmp_path), 5, write)


def test_a_signed_checkpoint_is_resumed_from(checkpoint: Path, tmp_path: Path) -> None:
    found = open_checkpoints(tmp_path).find_newest()
    assert found is not None
    assert (found[0].parent, found[1].step) == (checkpoint, 5)
    assert Checkpoints(checkpoint.parent, 3, 10).find_newest() is not None  # by a trainer without keys, too


def change_step(folder: Path) -> None:
    tree = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(tree | {"step": 6}))


def change_digest(folder: Path) -> None:
    (folder / "state/optimizer.pt").write_text("other moments")
    tree = json.loads((folder / MANIFEST).read_text())
    del tree["files"]["optimizer.pt"]
    (folder / MANIFEST).write_text(json.dumps(tree))


def reformat(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps(json.loads((folder / MANIFEST).read_text())))


def take_off(folder: Path) -> None:
    (folder / SIGNATURE).unlink()


def truncate_signature(folder: Path) -> None:
    (folder / SIGNATURE).write_text((folder / SIGNATURE).read_text()[:-20])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (change_step, "is not what the key"),
        (change_digest, "is not what the key"),
        (reformat, "is not what the key"),
        (take_off, "is not signed, and security.require_signed is set"),
        (truncate_signature, "has a damaged signature"),
    ],
)
def test_a_manifest_that_is_not_the_trainers_stops_the_start(
    change: Callable[[Path], None], sentence: str, checkpoint: Path, tmp_path: Path
) -> None:
    save_checkpoint(open_checkpoints(tmp_path), 4, write)
    change(checkpoint)
    with pytest.raises(SignatureError, match=sentence):
        read_checkpoint(checkpoint, make_signatures(tmp_path / "keys"))
    with pytest.raises(UserError, match=rf"{sentence}.*resume once with security\.require_signed=false"):
        open_checkpoints(tmp_path).find_newest()


def alter(state: Path) -> None:
    (state / "model/weights.pt").write_text("altered")


def remove(state: Path) -> None:
    (state / "optimizer.pt").unlink()


def swap(state: Path) -> None:
    (state / "optimizer.pt").write_text("weights")
    (state / "model/weights.pt").write_text("moments")


def add(state: Path) -> None:
    (state / "model/more.pt").write_text("more")


def link(state: Path) -> None:
    (state / "more").symlink_to("/etc")


@pytest.mark.parametrize("change", [alter, remove, swap, add, link])
def test_a_checkpoint_with_other_files_is_not_resumed_from(
    change: Callable[[Path], None], checkpoint: Path, tmp_path: Path
) -> None:
    older = save_checkpoint(open_checkpoints(tmp_path), 4, write)
    change(checkpoint / "state")
    with capture_logs() as logs:
        found = open_checkpoints(tmp_path).find_newest()
    assert found is not None
    assert found[0].parent == older
    assert "is damaged (" in logs[0]["reason"]
    assert logs[0]["reason"].endswith("since): take another")


def test_a_checkpoint_under_another_name_of_another_run_or_key_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    later = shutil.copytree(checkpoint, checkpoint.with_name("step_9"))
    with pytest.raises(UserError, match="step_9 is signed as that of step 5"):
        open_checkpoints(tmp_path).find_newest()
    shutil.rmtree(later)
    with pytest.raises(SignatureError, match="of another run"):
        read_checkpoint(checkpoint, make_signatures(tmp_path / "keys", "other"))
    with pytest.raises(SignatureError, match=r"not one of security\.verify_key_file"):
        read_checkpoint(checkpoint, make_signatures(tmp_path / "others"))


def test_an_unsigned_checkpoint_is_resumed_from_where_signatures_are_not_required(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    save_checkpoint(Checkpoints(folder, 3, 10), 5, write)
    assert not (folder / "step_5" / SIGNATURE).exists()
    assert open_checkpoints(tmp_path, require_signed=False).find_newest() is not None
    with pytest.raises(UserError, match="step_5 is not signed"):
        open_checkpoints(tmp_path).find_newest()


def overwrite(state: Path) -> None:
    file = state / "optimizer.pt"
    times = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"MOMENTS")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def overwrite_and_restore(state: Path) -> None:
    before = (state / "optimizer.pt").read_bytes()
    overwrite(state)
    (state / "optimizer.pt").write_bytes(before)


def wait_for_tick(folder: Path) -> None:
    """Return once the file system's clock has gone on: what changes now has another time than what was there."""
    probe = folder / "probe"
    probe.write_text("")
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        probe.write_text("")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (overwrite, "optimizer.pt"),
        (overwrite_and_restore, "optimizer.pt"),
        (lambda state: (state / "optimizer.pt").unlink(), "optimizer.pt"),
        (lambda state: (state / "model/more.pt").write_text(""), "model"),
    ],
    ids=["overwritten", "overwritten and restored", "removed", "added"],
)
def test_a_checkpoint_that_changes_between_its_check_and_its_loading_ends_the_start(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], object], name: str
) -> None:
    checkpoints = open_checkpoints(tmp_path)
    found = checkpoints.find_newest()
    assert found is not None
    checkpoints.require_unchanged(found[0])
    wait_for_tick(tmp_path)
    change(found[0])
    with pytest.raises(UserError, match=rf"state/{name} was changed while the checkpoint was verified and loaded"):
        checkpoints.require_unchanged(found[0])
    lenient = open_checkpoints(tmp_path, require_signed=False)
    lenient.require_unchanged(found[0])


def test_an_export_asks_for_the_signature_and_follows_no_name_out_of_the_folder(
    checkpoint: Path, tmp_path: Path
) -> None:
    import torch

    keys = RunSignatures(make_keys(tmp_path / "others"), "run")
    with pytest.raises(DataError, match=r"not one of security\.verify_key_file.*take another"):
        export_policy(checkpoint, tmp_path / "out", torch.float32, 10**6, keys)
    for name in ("../../elsewhere", "/etc", "step_5/../../x", ""):
        (checkpoint.parent / "best").write_text(name)
        with pytest.raises(DataError, match="names no best checkpoint"):
            find_checkpoint(checkpoint.parents[1], best=True)
    (checkpoint.parent / "best").write_text("step_5\n")
    assert find_checkpoint(checkpoint.parents[1], best=True) == checkpoint
