"""When Ray is asked for, what is refused, and which of several failed ranks is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError
from trainer_parts import write_model

import forage_trainer.engine.verl_cpu  # noqa: F401  (makes it verl's platform)
from forage_runtime.errors import DataError, SettingsError, UserError
from forage_runtime.settings import load_settings
from forage_trainer.__main__ import main
from forage_trainer.launch.ray_launcher import find_cause
from forage_trainer.launch.ray_rank import Rank, RankLocation


@pytest.mark.parametrize(
    ("overrides", "on_ray"),
    [
        ([], False),
        (["trainer.n_gpus_per_node=2"], True),
        (["trainer.ray.address=auto"], True),
        (["trainer.nnodes=2", "trainer.ray.address=10.0.0.1:6379"], True),
    ],
)
def test_ray_is_used_where_the_settings_ask_for_it(overrides: list[str], on_ray: bool) -> None:
    assert load_settings(None, overrides, {}).trainer.uses_ray is on_ray


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.nnodes=2"], "nnodes=2 needs a Ray cluster.*trainer.ray.address"),
        (["trainer.ray.address=ray://head:10001"], "trainer.ray.address.*expected host:port"),
        (["trainer.nnodes=0"], "trainer.nnodes.*greater than or equal to 1"),
    ],
)
def test_contradictory_launch_settings_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load_settings(None, overrides, {})


def test_ray_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="torchrun started this process, and the settings ask for Ray"):
        main(load_settings(None, ["trainer.n_gpus_per_node=2"], {}))


def build_death() -> Exception:
    return ActorDiedError()


def build_task_error(error: Exception) -> Exception:
    return RayTaskError("train", "traceback", error)


@pytest.mark.parametrize(
    ("failed", "rank"),
    [
        ({0: build_task_error(RuntimeError("connection closed by peer")), 1: build_death()}, 1),
        (
            {
                0: build_task_error(RuntimeError("closed")),
                1: build_task_error(RuntimeError("closed")),
                2: build_task_error(DataError("no file")),
            },
            2,
        ),
        ({1: build_task_error(RuntimeError("closed")), 0: build_task_error(RuntimeError("bug"))}, 0),
    ],
)
def test_the_rank_that_caused_the_failure_is_named(failed: dict[int, Exception], rank: int) -> None:
    assert find_cause(failed) == rank


def build_rank(number: int, folder: Path, *overrides: str, gpu: bool = False) -> Rank:
    """One outside of Ray."""
    result = Rank.__new__(Rank)
    result._settings = load_settings(None, [*overrides], {})
    result._folder = folder
    result._location = RankLocation(number, f"10.0.0.{number + 1}", "host", 1, gpu)
    return result


def test_a_run_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    here, there = (
        build_rank(number, tmp_path, f"run.dir={tmp_path / name}", "run.id=r") for number, name in enumerate("ab")
    )
    here.write_mark(".shared-1")
    here.check_mark(".shared-1")
    with pytest.raises(UserError, match=rf"run.dir {tmp_path / 'b'} is not shared: rank 1 \(pid 1 on 10.0.0.2, host\)"):
        there.check_mark(".shared-1")
    here.remove_mark(".shared-1")
    assert not list((tmp_path / "a/r").iterdir())


def test_a_node_that_lacks_folder_model_or_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    build_rank(1, tmp_path, "model.path=model").check_node()
    with pytest.raises(UserError, match=r"rank 1 .*no folder /nowhere .*that all nodes have"):
        build_rank(1, Path("/nowhere"), "model.path=model").check_node()
    with pytest.raises(UserError, match=r"rank 1 .*: model.path other does not exist"):
        build_rank(1, tmp_path, "model.path=other").check_node()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"rank 1 .*assigned it a GPU that its torch cannot use"):
        build_rank(1, tmp_path, "model.path=model", gpu=True).check_node()
