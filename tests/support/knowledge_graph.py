"""The example of one's own environment: its graph server, and the agent over a scripted policy that asks it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from scripted_engine import ScriptedEngine
from waiting import wait_until

from forage_proto.v1.trajectory_pb2 import ChatMessage, GroundTruth, Prompt, Trajectory
from forage_rollout.agent import Agent
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import EngineSettings, EnvironmentRoute, RewardSettings, RolloutSettings, Settings

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples/knowledge_graph"
SIZES = {"max_start_length": 500, "max_prompt_length": 9000, "max_obs_length": 300, "max_response_length": 300}
TRIPLES = [
    ("France", "capital", "Paris"),
    ("France", "currency", "Euro"),
    ("Lyon", "country", "France"),
    ("Paris", "country", "France"),
    ("Bonaire, Saba (Islands)", "capital", "Kralendijk"),
    ("Saint-Denis\u2028\x85", "country", "Réunion"),  # ends no line of the file
]


def load_environment() -> ModuleType:
    """The module of the example."""
    file = EXAMPLE / "environment.py"
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]) -> Iterator[str]:
    """host:port of a graph server of `TRIPLES`."""
    file, address = tmp_path_factory.mktemp("graph") / "triples.jsonl", free_address()
    rows = [dict(zip(("head", "relation", "tail"), triple, strict=True)) for triple in TRIPLES]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    with subprocess.Popen([sys.executable, str(EXAMPLE / "graph.py"), str(file), address]) as server:
        try:
            wait_until(lambda: server.poll() is not None or _answers(address))
            assert server.poll() is None
            yield address
        finally:
            server.kill()


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{address}/healthz", timeout=60).close()
    except OSError:
        return False
    return True


async def run(engine: ScriptedEngine, graph: str, reward: str, timeout_s: float = 300.0) -> Trajectory:
    """The trajectory of a policy that says what the engine says, over a graph server and a reward service."""
    params = {"address": graph, "timeout_s": timeout_s}
    route = EnvironmentRoute(name=f"{EXAMPLE}/environment.py:KnowledgeGraph", network=True, params=params)
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


def say_query(query: str) -> str:
    return f"<think>t</think> <kg-query> {query} </kg-query>"
