"""The GPUs of one machine, divided between services: a program in place of nvidia-smi lists them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from waiting import wait_until

from forage_cli.local.gpus import assign_gpus, build_stack, find_plan_problems
from forage_cli.local.home import find_home
from forage_cli.local.nvidia import list_gpus
from forage_cli.local.stack import SERVING, Program
from forage_cli.main import app
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import Settings, load_settings

EVERY = tuple(Program)
SMALL = "model.path=models/Qwen2.5-3B"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this machine one with so many H100s, and environments for GPUs (or for CPUs) beside the repository."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(count: int, cuda: str | None = "13.0", product: str = "NVIDIA H100 80GB HBM3") -> None:
        lines = "".join(
            f"echo '{number}, GPU-{number:08x}, {product}, 81559, 580.65.06, Disabled'\n" for number in range(count)
        )
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{lines}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        for name in EVERY:
            packages = tmp_path / ".venvs" / name / "lib" / "python3.11" / "site-packages" / "torch"
            packages.mkdir(parents=True, exist_ok=True)
            (packages / "version.py").write_text(f"cuda = {cuda!r}\n")
            python = tmp_path / ".venvs" / name / "bin" / "python"
            python.parent.mkdir(exist_ok=True)
            python.unlink(missing_ok=True)
            python.symlink_to(sys.executable)
            (tmp_path / ".venvs" / name / ".installed").touch()
        monkeypatch.setattr("forage_cli.local.home.find_home", lambda: tmp_path)

    return install


def load(*overrides: str) -> Settings:
    return load_settings(None, [SMALL, *overrides], {})


def show(settings: Settings, programs: tuple[Program, ...] = EVERY) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each service."""
    assignment = assign_gpus(settings, programs)
    return {name: assignment.build_environment(name)["CUDA_VISIBLE_DEVICES"] for name in programs}


def test_without_nvidia_smi_nothing_is_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []
    settings = load()
    assignment = assign_gpus(settings, EVERY)
    assert assignment.settings is settings
    assert assignment.build_environment(Program.ROLLOUT) == {}
    with pytest.raises(UserError, match=r"local.gpus.rollout has GPU 0, and this machine has none"):
        assign_gpus(load("local.gpus.rollout=[0]"), EVERY)
    with pytest.raises(
        UserError, match=r"retriever.device is gpu, and this machine has none: set retriever.device=cpu"
    ):
        assign_gpus(load("retriever.device=cuda"), EVERY)
    assert assign_gpus(load("retriever.device=cuda"), (Program.REWARD,)).gpus == {}


def test_eight_gpus_are_halved(machine: Callable[..., None]) -> None:
    machine(8)
    shown = {"redis": "", "reward": "", "retriever": "", "rollout": "0,1,2,3", "trainer": "4,5,6,7", "console": ""}
    assert show(load()) == shown
    assignment = assign_gpus(load("rollout.engine.tensor_parallel_size=2"), EVERY)
    settings = assignment.settings
    assert (settings.rollout.engine_replicas.min, settings.rollout.engine_replicas.max) == (2, 2)
    assert (settings.trainer.nnodes, settings.trainer.n_gpus_per_node) == (1, 4)
    assert assignment.plan is not None
    assert assignment.plan.request.gpu.name == "H100"


def test_numbers_of_the_settings_that_use_every_gpu_are_kept(machine: Callable[..., None]) -> None:
    machine(8)
    shown = show(load("rollout.engine_replicas={min: 2, max: 2}", "trainer.n_gpus_per_node=6"))
    assert (shown["rollout"], shown["trainer"]) == ("0,1", "2,3,4,5,6,7")


def test_halves_in_which_the_trainer_does_not_fit_are_not_taken(machine: Callable[..., None]) -> None:
    machine(8)
    assignment = assign_gpus(
        load("model.path=models/Qwen2.5-14B", "trainer.actor.ppo_max_token_len_per_gpu=32768"), EVERY
    )
    assert assignment.plan is not None
    assert assignment.plan.fits
    assert len(assignment.gpus[Program.TRAINER]) > 4


def test_lists_of_the_settings_are_kept_and_the_rest_is_the_other_services(machine: Callable[..., None]) -> None:
    machine(8)
    both = show(load("local.gpus.rollout=[6,7]", "local.gpus.trainer=[1,0]", "local.gpus.retriever=[5]"))
    assert (both["rollout"], both["trainer"], both["retriever"]) == ("6,7", "1,0", "5")
    one = show(load("local.gpus.trainer=[0,1,2]", "local.gpus.retriever=[3]"))
    assert (one["rollout"], one["trainer"], one["retriever"]) == ("4,5,6,7", "0,1,2", "3")


def test_services_without_a_trainer_show_the_engines_every_gpu(machine: Callable[..., None]) -> None:
    machine(4)
    settings = load("rollout.engine_replicas={min: 2, max: 2}")
    assert show(settings, SERVING)["rollout"] == "0,1,2,3"
    assert assign_gpus(settings, SERVING).settings is settings


def test_gpus_that_this_process_does_not_see_are_not_used(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-00000005")
    shown = show(load())
    assert (shown["rollout"], shown["trainer"]) == ("2", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=9 names 9, and nvidia-smi has the GPUs 0, 1, 2"):
        assign_gpus(load(), EVERY)


def test_services_on_cpus_see_no_gpu(machine: Callable[..., None]) -> None:
    machine(2, cuda=None)
    assert set(show(load()).values()) == {""}
    with pytest.raises(UserError, match=r"local.gpus.rollout has GPUs, and the rollout computes on CPUs: its PyTorch"):
        assign_gpus(load("local.gpus.rollout=[0]"), EVERY)
    machine(2)
    shown = show(load("trainer.device=cpu"))
    assert (shown["rollout"], shown["trainer"]) == ("0,1", "")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["local.gpus.rollout=[0,1]", "local.gpus.trainer=[1,2]"],
            "rollout and trainer share GPU 1.*placement=colocated",
        ),
        (["local.gpus.rollout=[0]", "local.gpus.retriever=[0]"], "rollout and retriever share GPU 0"),
        (["local.gpus.rollout=[0,0]"], r"rollout is \[0, 0\]: give each GPU once"),
        (["local.gpus.trainer=[-1]"], r"trainer is \[-1\]: give each GPU once, by its number from 0"),
    ],
)
def test_contradictory_lists_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load(*overrides)


def test_shared_gpus_are_shown_to_both(machine: Callable[..., None]) -> None:
    machine(4)
    colocated = ["trainer.placement=colocated", "trainer.max_staleness=0"]
    shown = show(load(*colocated))
    assert (shown["rollout"], shown["trainer"]) == ("0,1,2,3", "0,1,2,3")
    same = show(load(*colocated, "local.gpus.rollout=[2,3]", "local.gpus.trainer=[2,3]"))
    assert (same["rollout"], same["trainer"]) == ("2,3", "2,3")
    machine(1)
    assert show(load(*colocated))["trainer"] == "0"
    machine(7)
    odd = show(load(*colocated, "rollout.engine.tensor_parallel_size=2"))
    assert (odd["rollout"], odd["trainer"]) == ("0,1,2,3,4,5", "0,1,2,3,4,5,6")


def test_divisions_that_cannot_work_are_refused(machine: Callable[..., None]) -> None:
    machine(4)
    with pytest.raises(UserError, match=r"local.gpus.rollout has GPU 7, and this machine has 0, 1, 2, 3"):
        assign_gpus(load("local.gpus.rollout=[7]"), EVERY)
    with pytest.raises(UserError, match=r"leaves no GPU for the trainer"):
        assign_gpus(load("local.gpus.rollout=[0,1,2,3]"), EVERY)
    with pytest.raises(UserError, match=r"3 GPU\(s\) for the rollout are no multiple of 2, which an engine has"):
        assign_gpus(load("local.gpus.rollout=[0,1,2]", "rollout.engine.tensor_parallel_size=2"), EVERY)
    with pytest.raises(UserError, match=r"local.gpus.retriever gives it none: name its GPUs there, or set"):
        assign_gpus(load("retriever.device=gpu"), EVERY)
    with pytest.raises(UserError, match=r"local.gpus.retriever has GPUs, and .* retriever.device is cpu"):
        assign_gpus(load("retriever.device=cpu", "local.gpus.retriever=[3]"), EVERY)
    machine(1)
    for too_much in ("model.path=models/Qwen2.5-7B", "rollout.engine.tensor_parallel_size=2"):
        with pytest.raises(UserError, match=r"1 GPU\(s\) are too few .*trainer.placement=colocated"):
            assign_gpus(load(too_much), EVERY)


@pytest.mark.parametrize("product", ["NVIDIA H100 80GB HBM3", "a GPU of tomorrow"])
def test_engine_and_trainer_share_a_single_gpu_that_is_large_enough(machine: Callable[..., None], product: str) -> None:
    machine(1, product=product)
    tiny = load(f"model.path={find_home() / 'models/tiny-policy'}")
    assert (show(tiny)["rollout"], show(tiny)["trainer"]) == ("0", "0")
    assignment = assign_gpus(tiny, EVERY)
    engine, trainer = assignment.settings.rollout, assignment.settings.trainer
    assert engine.engine.gpu_memory_utilization == 0.5
    assert (engine.engine_replicas.max, trainer.nnodes, trainer.n_gpus_per_node) == (1, 1, 1)
    assert trainer.max_staleness == tiny.trainer.max_staleness
    assert "shared: the engine takes 50% of its memory" in str(assignment)
    small = assign_gpus(load("model.path=models/Qwen2.5-1.5B"), EVERY).settings.rollout.engine.gpu_memory_utilization
    assert 0.1 < small <= 0.5
    alone = assign_gpus(load("model.path=models/Qwen2.5-1.5B"), SERVING)
    assert alone.settings.rollout.engine.gpu_memory_utilization == 0.9


def test_a_driver_that_does_not_run_is_said(machine: Callable[..., None], tmp_path: Path) -> None:
    machine(1)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2; exit 9\n")
    with pytest.raises(UserError, match=r"nvidia-smi fails: NVIDIA-SMI has failed: start NVIDIA's driver"):
        list_gpus()
    with pytest.raises(UserError, match=r"start NVIDIA's driver"):
        assign_gpus(load(), EVERY)
    machine(1, cuda=None)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert assign_gpus(load(), EVERY).gpus == {}, "nobody needs it"
    with pytest.raises(UserError, match=r"nvidia-smi fails: exit status 9: start"):
        assign_gpus(load("local.gpus.retriever=[0]"), EVERY)


def test_a_gpu_or_a_model_that_no_plan_knows_is_halved_all_the_same(machine: Callable[..., None]) -> None:
    machine(2, product="NVIDIA Mystery 1")
    assert assign_gpus(load(), EVERY).plan is None
    ended = CliRunner().invoke(app, ["plan", SMALL])
    assert isinstance(ended.exception, UserError)
    assert str(ended.exception).startswith("this machine's GPUs (NVIDIA Mystery 1) are of a kind that no plan knows")
    machine(2)
    assert assign_gpus(load("model.path=models/mystery"), EVERY).plan is None


def test_config_check_warns_where_the_plan_does_not_fit(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(2)
    assert find_plan_problems(load("trainer.actor.ppo_max_token_len_per_gpu=4096")) == []
    (problem,) = find_plan_problems(load("model.path=models/Qwen2.5-7B"))
    assert problem.startswith("a GPU of the trainer needs ")
    assert problem.endswith("H100 has 79.6 GiB: 'forage plan' says what would fit")
    monkeypatch.setenv("PATH", "/usr/bin")
    assert find_plan_problems(load("model.path=models/Qwen2.5-7B")) == []


def test_each_process_gets_its_own_gpus(machine: Callable[..., None], tmp_path: Path) -> None:
    """Through the supervisor, to the environment of the processes themselves."""
    machine(8)
    programs = (Program.ROLLOUT, Program.TRAINER, Program.REWARD)
    for program in programs:
        python = tmp_path / ".venvs" / program / "bin" / "python"
        python.unlink()
        shown = r'"{\"shown\": \"$CUDA_VISIBLE_DEVICES\", \"order\": \"$CUDA_DEVICE_ORDER\"}"'
        python.write_text(f"#!/bin/sh\necho {shown}\nexec sleep 60\n")
        python.chmod(0o755)
    console = Console(record=True, width=200)
    stack = build_stack(load(f"run.dir={tmp_path}", "trainer.actor.ppo_max_token_len_per_gpu=4096"), programs, console)
    try:
        stack.start()
        logs = {program: stack.folder / "logs" / f"{program}.log" for program in programs}
        wait_until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs.values()))
        shown = {program: json.loads(log.read_text()) for program, log in logs.items()}
    finally:
        stack.stop()
    assert {program: one["shown"] for program, one in shown.items()} == {
        "rollout": "0,1,2,3",
        "trainer": "4,5,6,7",
        "reward": "",
    }
    assert {one["order"] for one in shown.values()} == {"PCI_BUS_ID"}
    assert "GPUs: rollout 0, 1, 2, 3; trainer 4, 5, 6, 7" in console.export_text()
    assert load_settings(stack.folder / "settings.yaml", environ={}).trainer.n_gpus_per_node == 4
