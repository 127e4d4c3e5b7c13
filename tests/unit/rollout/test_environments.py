"""Environments that run in the agent's process: the built-in ones, and the checks of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environment_parts import CASINO, build_agent, build_settings, run
from scripted_engine import ScriptedEngine

from forage_proto.v1.trajectory_pb2 import ActionKind, Prompt, Purpose
from forage_rollout.environments import load_environments
from forage_rollout.environments.environment import Budget
from forage_rollout.environments.frames import pack_budget, pack_frame, read_budget
from forage_rollout.environments.search import Search
from forage_rollout.environments.single_turn import SingleTurn
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import SettingsError
from forage_runtime.settings import EnvironmentRoute


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
    file.write_text(f"open({str(log)!r}, 'a', encoding='utf-8').write('x')\n{CASINO}")
    route = EnvironmentRoute(name=f"{file}:Casino")
    settings = build_settings("off", a=route, b=route)
    environments = load_environments(settings, RetrieverClient(settings.retriever.http_address))
    assert type(environments.select("a")) is type(environments.select("b"))
    assert environments.select("a") is not environments.select("b")
    assert log.read_text() == "x"


BASE = "from forage_rollout.environments import Environment\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1", "has no 'A': define it"),
        ("A = 1", "' is 1: expected a subclass of Environment"),
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
        load_environments(build_settings("off", kg=EnvironmentRoute(name=f"{file}:A")), RetrieverClient("127.0.0.1:9"))
    assert str(error.value).startswith(f"rollout.environments.kg ({file}:A): ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ({"name": "saerch"}, "(saerch): no environment has this name: expected one of search, single_turn"),
        ({"name": "search", "params": {"speed": 1}}, "'speed'"),
        ({"name": "single_turn", "params": {"stop": "never"}}, "params.stop is 'never': expected answer"),
        ({"name": "absent.py:A"}, "(absent.py:A): 'absent.py' is not a Python file"),
        ({"name": "Makefile"}, "(Makefile): no environment has this name: expected one of search, single_turn"),
        ({"name": "json:"}, "(json:): 'json:' names no code: expected FILE.py:NAME or MODULE:NAME"),
        ({"name": "json:dumps"}, "'json:dumps' is <function dumps"),
        ({"name": "json:nothing"}, "json has no 'nothing': define it, or name another"),
        ({"name": "no_such_package:Environment"}, "No module named 'no_such_package'"),
    ],
)
def test_a_wrong_route_is_named(route: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_environments(build_settings("off", kg=EnvironmentRoute(**route)), RetrieverClient("127.0.0.1:9"))
    assert "rollout.environments.kg" in str(error.value)
    assert words in str(error.value)


def test_a_budget_of_numpy_reaches_the_agent() -> None:
    sent = json.loads(pack_frame({"value": pack_budget(Budget(np.int64(5), np.int32(2)))})[4:])
    assert read_budget(sent["value"]) == Budget(5, 2)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        pack_budget(Budget(5.5))  # type: ignore[arg-type] - what one's own code may do
