"""Environments of one's own under an agent, each in its process."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from broken_configurations import REPOSITORY
from environment_parts import CASINO, build_settings, run
from pages import read_blocks
from scripted_engine import ScriptedEngine

from forage_proto.v1.trajectory_pb2 import Purpose, Status
from forage_rollout.environments import load_environments
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import SettingsError
from forage_runtime.settings import EnvironmentRoute


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "casino.py"
    file.write_text(CASINO)
    return file


async def test_a_custom_environment_decides_actions_lengths_and_observations(own: Path, char_codec: Any) -> None:
    settings = build_settings(own=EnvironmentRoute(name=f"{own}:Casino", params={"sides": 20}))
    engine = ScriptedEngine(char_codec(), ["<roll>a</roll>", "<roll>bad</roll>", "<answer>x</answer>"])
    for trajectory in await run(settings, engine, samples=2):  # two: what one rolls, the other does not see
        assert trajectory.status == Status.STATUS_OK
        assert [turn.tag for turn in trajectory.turns] == ["roll", "roll", "answer"]
        assert [turn.executed for turn in trajectory.turns] == [True, True, False]
        assert [turn.retrieval_status for turn in trajectory.turns] == [
            Status.STATUS_OK,
            Status.STATUS_INVALID_INPUT,
            Status.STATUS_UNSPECIFIED,
        ]
        assert trajectory.spans[2].text == "<dice>a of 20: 1&lt;/dice&gt;</dice>"
        assert trajectory.spans[4].text == "<dice>bad of 20: 2&lt;/dice&gt;</dice>"
    assert {request.stop for request in engine.asked} == {("</roll>", "</answer>")}
    assert sorted((r.max_tokens, r.min_tokens) for r in engine.asked) == [(30, 2)] * 2 + [(200, 0)] * 4


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def budget(self, e): return Budget(0)",
            "Budget(max_tokens=0, min_tokens=0): expected max_tokens of at least 1",
        ),
        ("def budget(self, e): return 64", "TypeError: budget returned 64: expected Budget"),
        ("def parse(self, text, e): return 'search'", "TypeError: parse returned 'search': expected Action"),
        ("def parse(self, text, e): raise RuntimeError(text)", "RuntimeError: no block"),
    ],
)
async def test_errors_of_an_environment_are_named_on_its_trajectories(
    tmp_path: Path, char_codec: Any, code: str, words: str
) -> None:
    file = tmp_path / "odd.py"
    file.write_text(f"from forage_rollout.environments import *\nclass Odd(Environment):\n    {code}\n")
    settings = build_settings(own=EnvironmentRoute(name=f"{file}:Odd"))
    for trajectory in await run(settings, ScriptedEngine(char_codec(), ["no block"]), samples=2):
        assert trajectory.status == Status.STATUS_INTERNAL
        assert trajectory.status_detail.startswith("environment Odd: ")
        assert words in trajectory.status_detail
        assert len(trajectory.loss_mask) == len(trajectory.token_ids) - trajectory.prompt_length


async def test_a_least_length_that_the_trainer_cannot_score_is_refused_in_training(own: Path, char_codec: Any) -> None:
    settings = build_settings(own=EnvironmentRoute(name=f"{own}:Casino"))
    engine = ScriptedEngine(char_codec(), ["<answer>x</answer>"])
    (trajectory,) = await run(settings, engine, purpose=Purpose.PURPOSE_TRAIN)
    assert trajectory.status == Status.STATUS_INTERNAL
    assert "Budget(max_tokens=30, min_tokens=2): what is sampled with min_tokens cannot be" in trajectory.status_detail
    assert not engine.asked


async def test_a_turn_that_was_answered_keeps_its_status_when_a_later_step_fails(own: Path, char_codec: Any) -> None:
    own.write_text(
        CASINO.replace("return Budget(30, min_tokens=2) if", "return Budget(30) if").replace("Budget(9999)", "None")
    )
    settings = build_settings(own=EnvironmentRoute(name=f"{own}:Casino"))
    (trajectory,) = await run(settings, ScriptedEngine(char_codec(), ["<roll>a</roll>"]))
    assert trajectory.status == Status.STATUS_INTERNAL
    assert [turn.retrieval_status for turn in trajectory.turns] == [Status.STATUS_OK]


def test_an_environment_may_be_in_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "casino_package.py").write_text(CASINO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = build_settings(own=EnvironmentRoute(name="casino_package:Casino"))
    assert load_environments(settings, RetrieverClient("127.0.0.1:9")).select("own").tags == ("roll", "answer")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        (
            "from forage_rollout.environments import *\nclass A(Environment): feedback = 1",
            "feedback is 1: expected",
        ),
    ],
)
def test_what_its_process_finds_wrong_with_a_file_is_said_here(tmp_path: Path, code: str, words: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(code)
    with pytest.raises(SettingsError) as error:
        load_environments(build_settings(kg=EnvironmentRoute(name=f"{file}:A")), RetrieverClient("127.0.0.1:9"))
    assert str(error.value).startswith(f"rollout.environments.kg ({file}:A): ")
    assert words in str(error.value)


def test_environments_are_checked_without_an_engine(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["forage_rollout.checks", f"rollout.environments.own.name={own}:Casino", "model.path=models/tiny-policy"]
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_module("forage_rollout.checks", run_name="__main__")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "argv", [*words, "rollout.environments.own.params.speed=1"])
    runpy.run_module("forage_rollout.checks", run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith(f"problem: rollout.environments.own ({own}:Casino): TypeError")
    assert said.count("\n") == 1


async def test_the_examples_of_the_how_to_page_work(repository: Path, tmp_path: Path, char_codec: Any) -> None:
    page = repository / "docs/guide/write-an-environment.md"
    (routes,) = (block.text for block in read_blocks(page, "yaml"))
    (code,) = (block.text for block in read_blocks(page, "python"))
    file = tmp_path / "dice.py"
    file.write_text(code)
    for route in yaml.safe_load(routes)["rollout"]["environments"].values():
        if ":" in route["name"]:
            route["name"] = f"{repository}/{route['name']}"
        load_environments(build_settings(own=EnvironmentRoute(**route)), RetrieverClient("127.0.0.1:9"))
    settings = build_settings(own=EnvironmentRoute(name=f"{file}:Dice"))
    lines = ["hm", "<roll>6</roll>", "<roll>7</roll>", "<answer>6</answer>"]
    first, again = [(await run(settings, ScriptedEngine(char_codec(), lines)))[0] for _ in range(2)]
    shown = [span.text for span in first.spans[2::2]]
    assert "I roll with <roll>sides</roll>" in shown[0]
    assert re.fullmatch(r"\s*<information>roll 1: [1-6]</information>\s*", shown[1])
    assert "There are dice of 4, 6 and 20 sides." in shown[2]
    assert [turn.retrieval_status for turn in first.turns[1:3]] == [Status.STATUS_OK, Status.STATUS_INVALID_INPUT]
    assert [span.text for span in again.spans] == [span.text for span in first.spans]
    assert first.finished
