"""Commands find what runs here, and refuse what it does not use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from forage_command import RunForage, run_forage
from rich.console import Console

from forage_cli.commands.options import load_run_settings
from forage_cli.commands.status import find_settings
from forage_cli.local import running, serving
from forage_cli.local.home import load_recipe
from forage_cli.local.stack import RECORD, shift_ports
from forage_records.trajectory_file import TrajectoryWriter
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings, load_settings

__all__ = ["run_forage"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder with a record counts as one whose services are processes of this user."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(serving, "is_running", lambda *_: False)
    monkeypatch.setattr(running, "_list_folders", lambda: {file.parent for file in tmp_path.rglob(RECORD)})


def write_run(
    name: str, *settings: str, runs: bool = False, runs_folder: str = "runs", service: str = "rollout"
) -> Path:
    """A run whose supervisor is this process, or one that has ended."""
    folder = Path(runs_folder, name).resolve()
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(load_recipe(None, [f"run.id={name}", *settings]).to_yaml())
    started = psutil.Process().create_time() if runs else 1.0
    supervisor = {"pid": os.getpid(), "started": started}
    services = [{"token": f"{service}-0123", "pid": 1, "started": 1.0}]
    (folder / RECORD).write_text(json.dumps({"supervisor": supervisor, "services": services}))
    return folder / "settings.yaml"


def test_what_runs_goes_before_the_latest_run_and_a_given_file_before_both() -> None:
    assert find_settings(None, None) is None
    ended = write_run("ended")
    Path("runs/latest").symlink_to("ended")
    assert find_settings(None, None) == Path("runs/latest/settings.yaml")
    served = write_run("local", runs=True)
    assert find_settings(None, None) == served
    assert find_settings(ended, None) == ended


def test_what_runs_is_found_with_another_folder_of_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_run("far", "run.dir=/elsewhere", "rollout.max_turns=5", runs=True, runs_folder="../elsewhere")
    assert find_settings(None, None) == file
    settings = load_run_settings(None, ["rollout.temperature=0.5"], None, "ask")
    assert (settings.run.id, settings.run.dir, settings.rollout.max_turns) == ("ask", Path("/elsewhere"), 5)
    assert load_run_settings(None, ["rollout.grpc_address=other:1"], None, "ask").rollout.max_turns != 5
    monkeypatch.setattr(psutil.Process, "cwd", lambda _: "/")
    assert find_settings(None, None) is None, "it was started from another folder"


@pytest.mark.parametrize("find", [find_settings, lambda config, port: load_run_settings(config, [], port, "ask")])
def test_several_are_listed_and_ports_or_a_file_tell_which_is_meant(find: Callable[..., object]) -> None:
    first, second = (write_run(name, *shift_ports(port), runs=True) for name, port in (("a", 13000), ("b", 14000)))
    with pytest.raises(UserError) as refused:
        find(None, None)
    assert str(refused.value).splitlines() == [
        "2 runs have services here: say which one is meant",
        "  a: -c runs/a/settings.yaml",
        "  b: -c runs/b/settings.yaml",
    ]
    assert find(None, 13000) == find(first, None)
    assert find(None, 14000) == find(second, None)
    assert find_settings(None, 15000) is None


def test_a_reward_service_of_a_rescore_is_no_stack_that_others_use(run_forage: RunForage) -> None:
    write_run("replay", "rollout.max_turns=7", runs=True, service="reward")
    assert find_settings(None, None) is None
    assert load_run_settings(None, [], None, "ask").rollout.max_turns != 7
    served = write_run("local", runs=True)
    assert find_settings(None, None) == served
    write_run("other", runs=True)
    assert "  local: --run runs/local\n" in run_forage("logs").stderr


def test_services_of_another_folder_are_compared_with_a_file_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "is_running", lambda *_: True)
    there = write_run("far", "rollout.max_turns=3", "data.corpus=corpus.jsonl", runs=True, runs_folder="../elsewhere")
    monkeypatch.setattr(psutil.Process, "cwd", lambda _: str(there.parents[1]))
    assert load_run_settings(None, [], None, "ask").run.id == "ask", "nobody asked for the demo's settings"
    Path("mine.yaml").write_text("rollout: {max_turns: 4}\n")
    with pytest.raises(UserError, match=r"the services of the run far, .* use rollout.max_turns=3, not 4"):
        load_run_settings(Path("mine.yaml"), [], None, "ask")
    Path("mine.yaml").write_text("data: {corpus: ../elsewhere/corpus.jsonl}\n")
    load_run_settings(Path("mine.yaml"), [], None, "ask")
    Path("mine.yaml").write_text("data: {corpus: corpus.jsonl}\n")
    with pytest.raises(UserError, match=r"use data.corpus=corpus.jsonl"):
        load_run_settings(Path("mine.yaml"), [], None, "ask")


def test_a_stack_that_was_started_elsewhere_is_used_by_its_own_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "is_running", lambda *_: True)
    write_run("local", "data.corpus=corpus.jsonl", runs=True)
    monkeypatch.setattr(psutil.Process, "cwd", lambda _: "/elsewhere")
    assert load_run_settings(None, [], None, "ask").data.corpus == Path("corpus.jsonl")


def test_whoever_says_where_services_run_has_not_asked_for_the_demos_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "is_running", lambda *_: True)
    address = "rollout.grpc_address=127.0.0.1:13030"
    write_run("local", address, "rollout.max_turns=5", runs=True)
    load_run_settings(None, [address], None, "ask")
    with pytest.raises(UserError, match=r"use rollout.max_turns=5, not 2"):
        load_run_settings(None, [address, "rollout.max_turns=2"], None, "ask")
    monkeypatch.setenv("FORAGE__ROLLOUT__MAX_TURNS", "1")
    with pytest.raises(UserError, match=r"use rollout.max_turns=5, not 1"):
        load_run_settings(None, [address], None, "ask")


@pytest.mark.parametrize(
    ("given", "program", "sentence"),
    [
        ("rollout.max_turns=1", "rollout", "use rollout.max_turns=3, not 1: leave it out, start other services with"),
        ("reward.routes.nq.name=em", "reward", "use reward.routes.nq=search_r1_format, not em"),
        ("reward.routes.other.name=em", "rollout", "use reward.routes.other=unset, not em"),
        ("data.corpus=corpus.jsonl", "rollout", "not corpus.jsonl"),
        ("model.path=elsewhere", "rollout", "not elsewhere"),
        ("rollout.max_turns=3", "rollout", ""),
        ("rollout.temperature=0.5", "rollout", ""),
        ("rollout.max_groups_in_flight=2", "rollout", ""),
        ("rollout.max_turns=1", "reward", ""),
        ("trainer.total_training_steps=3", "rollout", ""),
    ],
)
def test_what_running_services_do_not_use_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, given: str, program: str, sentence: str
) -> None:
    file = write_run("local", "rollout.max_turns=3", "reward.routes.nq.name=search_r1_format", runs=True)
    for config in (None, file):
        monkeypatch.setattr(serving, "is_running", lambda *_: True)
        if not sentence:
            load_run_settings(config, [given], None, "ask", program)
            continue
        with pytest.raises(UserError) as refused:
            load_run_settings(config, [given], None, "ask", program)
        assert "the services of the run local, which run here, " in str(refused.value)
        assert sentence in str(refused.value)


def test_services_that_were_not_started_here_are_said_to_answer_by_their_own_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "is_running", lambda *_: True)
    address = "rollout.grpc_address=rollout:1"
    load_run_settings(None, [address, "rollout.max_turns=1"], None, "ask")
    said = "the services at rollout:1 answer by their own settings, whatever rollout.max_turns is here\n"
    assert capsys.readouterr().err == said
    assert load_run_settings(None, [address, "rollout.temperature=0.5"], None, "ask").rollout.temperature == 0.5
    assert capsys.readouterr().err == ""


def test_a_model_that_running_services_do_not_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "is_running", lambda *_: True)
    with pytest.raises(UserError, match="are not switched to mine: leave it out"):
        serving.ensure_services(load_settings(None, (), {}), Console(), model=Path("mine")).__enter__()


def test_a_rescore_has_a_reward_service_of_its_own_beside_running_ones(
    monkeypatch: pytest.MonkeyPatch, run_forage: RunForage
) -> None:
    def note(settings: Settings, *_: object) -> NoReturn:
        asked.append(settings)
        raise UserError("enough")

    asked: list[Settings] = []
    file = write_run("local", "rollout.max_turns=5", "reward.routes.nq.name=search_r1_format", runs=True)
    with TrajectoryWriter(Path("stored.parquet"), ""):
        pass
    moved = load_settings(file, ["reward.grpc_address=127.0.0.1:1"], {})
    monkeypatch.setattr(serving, "is_running", lambda *_: True)
    monkeypatch.setattr(serving, "move_reward", lambda settings: settings.model_copy(update={"reward": moved.reward}))
    monkeypatch.setattr(serving, "ensure_services", note)
    replay = ["rollout", "replay", "stored.parquet", "--rescore", "reward.routes.nq.name=em"]
    assert "enough" in run_forage(*replay).stderr
    assert asked[0].reward.grpc_address == "127.0.0.1:1"
    assert asked[0].rollout.max_turns == 5
    assert "use reward.routes.nq=search_r1_format, not em" in run_forage(*replay, "-c", str(file)).stderr
