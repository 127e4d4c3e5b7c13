"""The example of one's own environment: its real graph server, the real agent, the real reward service; a scripted
policy."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import CharCodec, ScriptedEngine

from forage_common.clients.retriever import RetrieverClient
from forage_common.clients.reward import RewardClient
from forage_common.settings import EngineSettings, EnvironmentRoute, RewardSettings, RolloutSettings, Settings
from forage_common.v1.trajectory_pb2 import ChatMessage, GroundTruth, Prompt, Status, Trajectory
from forage_rollout.agent import Agent

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = REPOSITORY / "examples/knowledge_graph"
SIZES = {"max_start_length": 500, "max_prompt_length": 9000, "max_obs_length": 300, "max_response_length": 300}
TRIPLES = [
    ("France", "capital", "Paris"),
    ("France", "currency", "Euro"),
    ("Lyon", "country", "France"),
    ("Paris", "country", "France"),
    ("Bonaire, Saba (Islands)", "capital", "Kralendijk"),
]


def load_module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


environment = load_module(EXAMPLE / "environment.py")


@pytest.fixture
def graph(tmp_path: Path, free_address: Callable[[], str]) -> Iterator[str]:
    """host:port of a graph server of `TRIPLES`."""
    file, address = tmp_path / "triples.jsonl", free_address()
    rows = [dict(zip(("head", "relation", "tail"), triple, strict=True)) for triple in TRIPLES]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with subprocess.Popen([sys.executable, str(EXAMPLE / "graph.py"), str(file), address]) as server:
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/healthz", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                assert server.poll() is None
                time.sleep(0.05)
        yield address
        server.kill()


@pytest.fixture
def reward(
    start_service: Callable[..., Any], wait_until_ready: Callable[..., None], free_address: Callable[[], str]
) -> str:
    """host:port of a reward service that judges by `structured`."""
    address, health = free_address(), free_address()
    process = start_service(
        "reward",
        f"reward.grpc_address={address}",
        f"reward.health_address={health}",
        "reward.routes.knowledge_graph.name=structured",
    )
    wait_until_ready(process, health)
    return address


async def run(engine: ScriptedEngine, graph: str, reward: str, timeout_s: float = 5.0) -> Trajectory:
    params = {"address": graph, "timeout_s": timeout_s}
    route = EnvironmentRoute(path=EXAMPLE / "environment.py", network=True, params=params)
    rollout = RolloutSettings(
        **SIZES, max_turns=8, environments={"knowledge_graph": route}, engine=EngineSettings(max_model_len=9999)
    )
    settings = Settings(rollout=rollout, reward=RewardSettings(grpc_address=reward))
    retriever = RetrieverClient(settings.retriever.http_address)
    agent = Agent(settings, engine, retriever, RewardClient(settings), engine.codec, "<end>", "replica-1")
    prompt = Prompt(
        run_id="r",
        group_uid="g",
        data_source="knowledge_graph",
        samples=1,
        messages=[ChatMessage(role="user", content="What is the capital of the country of Lyon?")],
        ground_truth=GroundTruth(targets=["Paris"]),
    )
    (trajectory,) = (await agent.run_group(prompt)).trajectories
    await agent.close()
    return trajectory


def turn(query: str) -> str:
    return f"<think>t</think> <kg-query> {query} </kg-query>"


async def test_only_a_new_query_that_the_graph_could_answer_is_valid(graph: str, reward: str) -> None:
    asked = [
        ("get_tail_entities(Lyon, country)", True, "France"),
        ("get_tail_entities(Lyon, country", False, "This is not a query."),
        ("get_tail_entities(lyon,  country)", True, "France"),  # asked before
        ("get_head_entities(France, country)", True, "Lyon, Paris"),
        ("get_tail_entities(Lyn, country)", False, "The graph has no entity Lyn. Did you mean Lyon?"),
        ("__import__('os').system(1)", False, "There is no function __import__."),
        ("get_tail_entities(France, capital)", True, "Paris"),
    ]
    lines = [*(turn(query) for query, _, _ in asked), "<think>t</think> <answer> Paris </answer>"]
    trajectory = await run(ScriptedEngine(CharCodec(), lines), graph, reward)
    assert trajectory.status == Status.STATUS_OK, trajectory.status_detail
    observations = [span.text for span in trajectory.spans[2::2]]
    for searched_turn, shown, (query, known, says) in zip(trajectory.turns, observations, asked, strict=False):
        assert (searched_turn.tag, searched_turn.content, searched_turn.executed) == ("kg-query", query, True)
        assert searched_turn.retrieval_status == (Status.STATUS_OK if known else Status.STATUS_INVALID_INPUT)
        assert shown.startswith(f"\n\n<information>{says}")
        assert shown.endswith("</information>\n\n")
    parts = {part.name: part for part in trajectory.score.components}
    # kg_query_validity 0.1 for a new query that succeeded, format_score 0.15 for each well-formed turn
    earned = [parts[f"turn_{index}"].raw for index in range(1, 9)]
    assert earned == pytest.approx([0.25, 0.15, 0.15, 0.25, 0.15, 0.15, 0.25, 0.25])
    assert parts["_query_validity"].raw == pytest.approx(3 / 8)
    assert parts["exact_match"].raw == parts["retrieval_quality"].raw == 1.0


async def test_an_unavailable_graph_leaves_a_status_and_no_score(reward: str, free_address: Callable[[], str]) -> None:
    engine = ScriptedEngine(CharCodec(), [turn("get_tail_entities(Lyon, country)")])
    trajectory = await run(engine, free_address(), reward, timeout_s=0.5)
    assert trajectory.status == Status.STATUS_TIMEOUT
    assert "knowledge graph" in trajectory.status_detail
    assert not trajectory.HasField("score")


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("get_tail_relations(France)", "capital, currency"),
        ("get_head_relations(France)", "country"),
        ("get_head_entities(France, country)", "Lyon, Paris"),
        ("get_tail_entities(Bonaire, Saba (Islands), capital)", "Kralendijk"),
        ("get_tail_relations(Euro)", "none"),
        (
            "get_tail_entities(France, mayor)",
            "France has no relation mayor in this direction. It has: capital, currency.",
        ),
        ("get_tail_entities(Atlantis, capital)", "The graph has no entity Atlantis."),
    ],
)
async def test_the_graph_answers_each_function(graph: str, query: str, shown: str) -> None:
    graph_environment = environment.KnowledgeGraph(RolloutSettings(), None, address=graph)
    action = graph_environment.parse(turn(query), None)
    observation = await graph_environment.respond(action, None)
    await graph_environment.close()
    assert observation.body == shown
    assert observation.succeeded == (not shown.endswith("."))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "This is not a query."),
        ("France", "This is not a query."),
        ("get_capital(France)", "There is no function get_capital."),
        ("get_tail_entities(France)", "Write get_tail_entities(entity, relation)."),
        ("get_tail_entities(, capital)", "Write get_tail_entities(entity, relation)."),
        ("get_tail_entities(France, )", "Write get_tail_entities(entity, relation)."),
        ("get_tail_relations( )", "Write get_tail_relations(entity)."),
        ("get_tail_relations(France) get_tail_relations(Lyon)x", "This is not a query."),
        ("get_tail_relations(" + "x" * 500 + ")", "A query has at most 500 characters."),
    ],
)
def test_a_malformed_query_is_explained(text: str, words: str) -> None:
    with pytest.raises(environment.QueryError) as error:
        environment.parse(text)
    assert str(error.value).startswith(words)


@given(st.text(alphabet="get_tailhdrons(), \n", max_size=80) | st.text(max_size=80))
def test_no_text_breaks_the_parser_of_queries(text: str) -> None:
    try:
        query = environment.parse(text)
    except environment.QueryError:
        return
    assert query.entity == query.entity.strip() != ""
    assert ("entities" in query.function) == bool(query.relation)


def test_the_configuration_of_the_example_is_valid() -> None:
    for name in ("knowledge_graph", "countdown"):
        command = [sys.executable, "-m", "forage_rollout.environments", "--config", f"configs/{name}.yaml"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
