"""Environments: the built-in ones, and the checks of custom ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted_engine import ScriptedEngine

from forage_common.clients.retriever import RetrieverClient
from forage_common.clients.reward import RewardClient
from forage_common.errors import SettingsError
from forage_common.settings import EngineSettings, EnvironmentRoute, RolloutSettings, Settings
from forage_common.settings.security import SecuritySettings
from forage_common.v1.trajectory_pb2 import ActionKind, ChatMessage, Prompt, Purpose, Status, Trajectory
from forage_rollout.agent import Agent
from forage_rollout.environments import load_environments
from forage_rollout.environments.search import Search
from forage_rollout.environments.single_turn import SingleTurn

SIZES = {"max_start_length": 500, "max_prompt_length": 5000, "max_obs_length": 500, "max_response_length": 200}
OWN = """
from dataclasses import dataclass
from forage_rollout.environments import Action, Budget, Environment, Episode, Observation

@dataclass
class Dice:
    sides: int

class Casino(Environment):
    tags = ("roll", "answer")
    feedback = "roll or answer"

    def __init__(self, settings, retriever, sides=6):
        super().__init__(settings, retriever)
        self.dice = Dice(sides)
        self.max_turns = 5

    def budget(self, episode):
        return Budget(30, min_tokens=2) if episode.turn == 1 else Budget(9999)

    async def respond(self, action, episode):
        episode.state["rolls"] = episode.state.get("rolls", 0) + 1
        return Observation(f"{action.content} of {self.dice.sides}: {episode.state['rolls']}</dice>",
                           opening="<dice>", closing="</dice>", succeeded=action.content != "bad")
"""


def build_settings(**environments: EnvironmentRoute) -> Settings:
    engine = EngineSettings(max_model_len=9999)
    return Settings(rollout=RolloutSettings(**SIZES, environments=environments, engine=engine))


def build_agent(settings: Settings, engine: ScriptedEngine) -> Agent:
    retriever = RetrieverClient(settings.retriever.http_address, timeout_s=0.5)
    return Agent(settings, engine, retriever, RewardClient(settings), engine.codec, "<end>", "replica-1")


async def run(
    settings: Settings,
    engine: ScriptedEngine,
    source: str = "own",
    samples: int = 1,
    purpose: Purpose.ValueType = Purpose.PURPOSE_ASK,
) -> list[Trajectory]:
    prompt = Prompt(
        run_id="r",
        group_uid="g",
        data_source=source,
        samples=samples,
        purpose=purpose,
        messages=[ChatMessage(role="user", content="Q")],
    )
    return list((await build_agent(settings, engine).run_group(prompt)).trajectories)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "casino.py"
    file.write_text(OWN)
    return file


async def test_a_custom_environment_decides_actions_lengths_and_observations(own: Path, char_codec: Any) -> None:
    settings = build_settings(own=EnvironmentRoute(path=own, params={"sides": 20}))
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
    settings = build_settings(own=EnvironmentRoute(path=file))
    for trajectory in await run(settings, ScriptedEngine(char_codec(), ["no block"]), samples=2):
        assert trajectory.status == Status.STATUS_INTERNAL
        assert trajectory.status_detail.startswith("environment Odd: ")
        assert words in trajectory.status_detail
        assert len(trajectory.loss_mask) == len(trajectory.token_ids) - trajectory.prompt_length


async def test_a_least_length_that_the_trainer_cannot_score_is_refused_in_training(own: Path, char_codec: Any) -> None:
    settings = build_settings(own=EnvironmentRoute(path=own))
    engine = ScriptedEngine(char_codec(), ["<answer>x</answer>"])
    (trajectory,) = await run(settings, engine, purpose=Purpose.PURPOSE_TRAIN)
    assert trajectory.status == Status.STATUS_INTERNAL
    assert "Budget(max_tokens=30, min_tokens=2): what is sampled with min_tokens cannot be" in trajectory.status_detail
    assert not engine.asked


async def test_a_turn_that_was_answered_keeps_its_status_when_a_later_step_fails(own: Path, char_codec: Any) -> None:
    own.write_text(
        OWN.replace("return Budget(30, min_tokens=2) if", "return Budget(30) if").replace("Budget(9999)", "None")
    )
    settings = build_settings(own=EnvironmentRoute(path=own))
    (trajectory,) = await run(settings, ScriptedEngine(char_codec(), ["<roll>a</roll>"]))
    assert trajectory.status == Status.STATUS_INTERNAL
    assert [turn.retrieval_status for turn in trajectory.turns] == [Status.STATUS_OK]


async def test_single_turn_ends_with_its_answer(char_codec: Any) -> None:
    settings = build_settings(own=EnvironmentRoute(name="single_turn"))
    engine = ScriptedEngine(char_codec(), ["<think>1+1</think><answer> 1 + 1 </answer>", "never asked for"])
    (trajectory,) = await run(settings, engine)
    assert [request.stop for request in engine.asked] == [("</answer>",)]
    assert (trajectory.finished, trajectory.turns[0].content, trajectory.turns[0].tag) == (True, "1 + 1", "answer")
    assert len(trajectory.spans) == 2


@pytest.mark.parametrize(
    ("said", "finished", "truncated", "content"),
    [
        ("so it is \\boxed{7}<end>", True, False, "so it is \\boxed{7}"),
        ("<answer>7</answer> and more<end>", True, False, "7"),
        ("x" * 300, False, True, ""),
    ],
)
async def test_single_turn_to_eos_is_an_answer_unless_its_length_ended_it(
    char_codec: Any, said: str, finished: bool, truncated: bool, content: str
) -> None:
    settings = build_settings(own=EnvironmentRoute(name="single_turn", params={"stop": "eos"}))
    engine = ScriptedEngine(char_codec(special=["<end>"]), [said])
    (trajectory,) = await run(settings, engine)
    assert engine.asked[0].stop == ()
    assert (trajectory.finished, trajectory.truncated) == (finished, truncated)
    assert trajectory.turns[0].content == content
    kind = ActionKind.ACTION_KIND_ANSWER if finished else ActionKind.ACTION_KIND_INVALID
    assert trajectory.turns[0].action == kind
    assert trajectory.spans[1].text == said[:200]
    assert len(trajectory.spans) == 2


def test_a_data_source_without_an_environment_searches(char_codec: Any) -> None:
    settings = build_settings(countdown=EnvironmentRoute(name="single_turn"))
    environments = load_environments(settings, RetrieverClient(settings.retriever.http_address))
    assert type(environments.select("countdown")) is SingleTurn
    assert type(environments.select("nq")) is type(environments.select("")) is Search


async def test_a_prompt_may_name_its_environment(char_codec: Any) -> None:
    settings = build_settings(own=EnvironmentRoute(name="single_turn", params={"stop": "eos"}))
    engine = ScriptedEngine(char_codec(), ["<search> x </search>", "<answer> 7 </answer>"])
    for name, stops in (("", ()), ("single_turn", ("</answer>",)), ("search", ("</search>", "</answer>"))):
        prompt = Prompt(data_source="own", samples=1, token_ids=[65], environment=name, purpose=Purpose.PURPOSE_ASK)
        engine.asked.clear()
        await build_agent(settings, engine).run_group(prompt)
        assert engine.asked[0].stop == stops, name


def test_in_one_process_a_file_is_imported_once(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    log = tmp_path / "log"
    file.write_text(f"open({str(log)!r}, 'a').write('x')\n{OWN}")
    route = EnvironmentRoute(path=file)
    settings = build_settings(a=route, b=route).model_copy(update={"security": SecuritySettings(user_code="off")})
    environments = load_environments(settings, RetrieverClient(settings.retriever.http_address))
    assert type(environments.select("a")) is type(environments.select("b"))
    assert environments.select("a") is not environments.select("b")
    assert log.read_text() == "x"


BASE = "from forage_rollout.environments import Environment\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1", "defines 0 environments (none): expected one subclass"),
        (f"{BASE}class A(Environment): pass\nclass B(Environment): pass", "defines 2 environments (A, B)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class A(", "SyntaxError"),
        (f"{BASE}class A(Environment): tags = 'search'", "tags is 'search': expected a tuple of names"),
        (f"{BASE}class A(Environment): tags = ('a b',)", "tags is ('a b',): expected a tuple of names"),
        (f"{BASE}class A(Environment): feedback = None", "feedback is None: expected a string"),
        (f"{BASE}class A(Environment): stops = ['</answer>']", "stops is ['</answer>']: expected a tuple"),
        (f"{BASE}class A(Environment):\n    def respond(self, a, e): pass", "respond is not a coroutine function"),
        (
            f"{BASE}class A(Environment):\n    def __init__(self, s, r):\n        super().__init__(s, r)\n"
            "        self.max_turns = -1",
            "max_turns is -1: expected 0 or more",
        ),
        (f"{BASE}class A(Environment):\n    def __init__(self): pass", "TypeError"),
    ],
)
def test_a_file_without_an_environment_is_refused_with_what_was_expected(tmp_path: Path, code: str, words: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(code)
    with pytest.raises(SettingsError) as error:
        load_environments(build_settings(kg=EnvironmentRoute(path=file)), RetrieverClient("127.0.0.1:9"))
    assert str(error.value).startswith(f"rollout.environments.kg ({file}): ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ({"name": "saerch"}, "(saerch): no environment has this name: expected one of search, single_turn"),
        ({"name": "search", "params": {"speed": 1}}, "'speed'"),
        ({"name": "single_turn", "params": {"stop": "never"}}, "params.stop is 'never': expected answer"),
        ({"path": "absent.py"}, "(absent.py): not a Python file"),
        ({"path": "Makefile"}, "(Makefile): not a Python file"),
        ({"entry_point": "json"}, "(json): entry_point must be module:class"),
        ({"entry_point": "json:dumps"}, "dumps is <function dumps"),
        ({"entry_point": "json:nothing"}, "nothing is None: expected a subclass of Environment"),
        ({"entry_point": "no_such_package:Environment"}, "No module named 'no_such_package'"),
    ],
)
def test_a_wrong_route_is_named(route: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_environments(build_settings(kg=EnvironmentRoute(**route)), RetrieverClient("127.0.0.1:9"))
    assert "rollout.environments.kg" in str(error.value)
    assert words in str(error.value)


def test_an_entry_point_is_an_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "casino_package.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = build_settings(own=EnvironmentRoute(entry_point="casino_package:Casino"))
    assert load_environments(settings, RetrieverClient("127.0.0.1:9")).select("own").tags == ("roll", "answer")


def test_environments_are_checked_without_an_engine(own: Path) -> None:
    command = [sys.executable, "-m", "forage_rollout.environments", f"rollout.environments.own.path={own}"]
    assert subprocess.run(command).returncode == 0
    wrong = subprocess.run([*command, "rollout.environments.own.params.speed=1"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith(f"rollout.environments.own ({own}): TypeError")
    assert wrong.stderr.count("\n") == 1


async def test_the_examples_of_the_how_to_page_work(repository: Path, tmp_path: Path, char_codec: Any) -> None:
    page = (repository / "docs/how-to/write-an-environment.md").read_text()
    (routes,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "dice.py"
    file.write_text(code)
    for route in yaml.safe_load(routes)["rollout"]["environments"].values():
        if "path" in route:
            route["path"] = repository / route["path"]
        load_environments(build_settings(own=EnvironmentRoute(**route)), RetrieverClient("127.0.0.1:9"))
    settings = build_settings(own=EnvironmentRoute(path=file))
    lines = ["hm", "<roll>6</roll>", "<roll>7</roll>", "<answer>6</answer>"]
    first, again = [(await run(settings, ScriptedEngine(char_codec(), lines)))[0] for _ in range(2)]
    shown = [span.text for span in first.spans[2::2]]
    assert "I roll with <roll>sides</roll>" in shown[0]
    assert re.fullmatch(r"\s*<information>roll 1: [1-6]</information>\s*", shown[1])
    assert "There are dice of 4, 6 and 20 sides." in shown[2]
    assert [turn.retrieval_status for turn in first.turns[1:3]] == [Status.STATUS_OK, Status.STATUS_INVALID_INPUT]
    assert [span.text for span in again.spans] == [span.text for span in first.spans]
    assert first.finished
