"""Checkpoints and published policies: complete or absent, whatever moment the process dies at."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forage_common.errors import FencedError, UserError
from forage_common.settings import RedisSettings
from forage_common.streams import StreamClient
from forage_common.telemetry import Health
from forage_trainer.checkpoint import Checkpoints, ConsumedGroup, ConsumedStep
from forage_trainer.files import digest, new_folder
from forage_trainer.progress import MetricsFile
from forage_trainer.publisher import KEPT, Publisher
from forage_trainer.waiting import Insist, Stop

CONSUMED = (ConsumedStep(3, 2, (ConsumedGroup(3, 0, 1, "s/train/7/0", "17-1"),)),)


class Died(BaseException):
    """Stands for kill -9: nothing after it runs in the code under test but clean-up, which the next start repeats."""


def writes(text: str, then: BaseException | None = None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights.pt").write_text(text)
        if then is not None:
            raise then

    return write


def save(checkpoints: Checkpoints, step: int, then: BaseException | None = None) -> Path:
    return checkpoints.save(step, 2, "data", CONSUMED, {"step": step}, writes(f"weights {step}", then))


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, 2, 10), 5)
    found = Checkpoints(tmp_path, 2, 10).newest()
    assert found is not None
    state, manifest = found
    assert (state / "weights.pt").read_text() == "weights 5"
    assert (manifest.step, manifest.epoch, manifest.data, manifest.figures) == (5, 2, "data", {"step": 5})
    assert manifest.consumed == CONSUMED
    assert (tmp_path / "latest").read_text() == "step_5\n"


@pytest.mark.parametrize("error", [Died(), OSError(errno.EIO, "broken")])
def test_a_save_that_does_not_end_leaves_the_one_before(tmp_path: Path, error: BaseException) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    save(checkpoints, 5)
    with pytest.raises(type(error)):
        save(checkpoints, 6, error)
    found = Checkpoints(tmp_path, 2, 10).newest()
    assert found is not None
    assert found[1].step == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_5"]


def test_what_a_killed_process_was_writing_is_removed_at_the_next_start(tmp_path: Path) -> None:
    half = tmp_path / ".partial-step_6"
    (half / "state").mkdir(parents=True)
    (half / "state/weights.pt").write_text("half")
    assert Checkpoints(tmp_path, 2, 10).newest() is None
    assert not half.exists()


def test_a_process_killed_between_rename_and_latest_still_has_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 3, 10)
    save(checkpoints, 5)
    save(checkpoints, 6)
    (tmp_path / "latest").write_text("step_5\n")
    found = checkpoints.newest()
    assert found is not None
    assert found[1].step == 6


@pytest.mark.parametrize("damage", ["weights", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    save(checkpoints, 5)
    path = save(checkpoints, 6)
    (path / "state/weights.pt" if damage == "weights" else path / "manifest.json").write_text("rotten")
    found = checkpoints.newest()
    assert found is not None
    assert found[1].step == 5


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    for step in (5, 9, 10, 15):
        save(checkpoints, step)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_10", "step_15"]


def test_without_disk_space_nothing_is_written_and_the_sentence_has_the_figures(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, parameters=1000, free_bytes=lambda _: 15_999)
    with pytest.raises(UserError, match=rf"{tmp_path} needs 16000 bytes and has 15999 bytes free"):
        save(checkpoints, 5)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_writing_is_a_users_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, 10)
    with pytest.raises(UserError, match="no disk space for a checkpoint"):
        save(checkpoints, 5, OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a") as folder:
        (folder / "one").write_text("1")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a/one").read_text() == "1"


def test_metrics_of_steps_beyond_a_checkpoint_are_dropped(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        metrics.append({"step": step, "kl": float("nan")})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "re')
    metrics.rewind(2)
    metrics.ensure({"step": 2})
    metrics.ensure({"step": 3, "again": True})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "kl": None}, {"step": 2, "kl": None}, {"step": 3, "again": True}]


@pytest.fixture
def streams(redis_server: RedisSettings) -> StreamClient:
    return StreamClient(redis_server, "publish", 2.0)


def publisher(tmp_path: Path, streams: StreamClient, epoch: int) -> Publisher:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["X"], "torch_dtype": "bfloat16"}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"the initial weights, not to be copied")
    return Publisher(tmp_path / "policies", model, streams, epoch, Insist(Stop(), Health()))


def test_a_published_policy_is_a_model_folder_with_its_checksum(tmp_path: Path, streams: StreamClient) -> None:
    policy = publisher(tmp_path, streams, 3).publish(7, {"w": torch.arange(4.0)})
    folder = Path(policy.uri)
    assert folder.name == "v7-e3"
    assert json.loads((folder / "config.json").read_text()) == {"architectures": ["X"], "dtype": "float32"}
    assert (folder / "tokenizer.json").exists()
    assert load_file(folder / "model.safetensors")["w"].tolist() == [0, 1, 2, 3]
    assert policy.digest == digest(folder / "model.safetensors")
    assert streams.policy() == policy


def test_an_older_trainer_is_fenced(tmp_path: Path, streams: StreamClient) -> None:
    old, new = publisher(tmp_path, streams, 1), publisher(tmp_path, streams, 2)
    old.publish(0, {"w": torch.zeros(1)})
    announced = new.publish(0, {"w": torch.zeros(1)})
    with pytest.raises(FencedError, match="epoch 1 is over"):
        old.publish(1, {"w": torch.ones(1)})
    assert streams.policy() == announced


def test_old_folders_go_but_not_one_that_a_replica_serves(tmp_path: Path, streams: StreamClient) -> None:
    source = publisher(tmp_path, streams, 1)
    served = source.publish(0, {"w": torch.zeros(1)})
    streams.acknowledge_policy("replica", served)
    for version in range(1, KEPT + 3):
        source.publish(version, {"w": torch.zeros(1)})
    newest = [f"v{version}-e1" for version in range(3, KEPT + 3)]
    assert sorted(p.name for p in (tmp_path / "policies").iterdir()) == sorted(["v0-e1", *newest])
