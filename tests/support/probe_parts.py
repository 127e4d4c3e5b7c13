"""Two policies that are known: one does not read its thought, the other answers as it says."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from completions_server import CompletionsServer, encode, serve_completions, write_character_model
from rich.console import Console

from forage_cli.local import serving
from forage_cli.local.stack import Program, shift_ports
from forage_probe.contexts import CONNECTIVE
from forage_probe.prober import ProbePlan
from forage_proto.v1.trajectory_pb2 import ActionKind, GroundTruth, Role, Score, Span, Status, Trajectory, Turn
from forage_runtime.settings import Settings, load_settings

REPOSITORY = Path(__file__).parents[2]
FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()", "probe"]
LENGTH = 40
PLAN = ProbePlan(points=10, samples=50, seed=7)
RIGHT = {"world_facts": " oslo ", "puzzle": " (4 -\n 1) * 2 "}
WRONG = {"world_facts": (" Rome ", " Bern "), "puzzle": (" 4 + 1 + 2 ", " 6 ")}


def find_source(context: str) -> str:
    return "puzzle" if "Make 6" in context else "world_facts"


def answer(source: str, right: bool, chance: random.Random) -> str:
    return (RIGHT[source] if right else chance.choice(WRONG[source])) + "</answer> and more"


def answer_ignorantly(context: str, chance: random.Random) -> str:
    """Right in seven of ten, whatever it has thought."""
    return answer(find_source(context), chance.random() < 0.7, chance)


def answer_thoughtfully(context: str, chance: random.Random) -> str:
    """Right as often as it has a share of its thought."""
    kept = context.rpartition("<think>")[2].removesuffix(CONNECTIVE).count(".")
    return answer(find_source(context), chance.random() < kept / LENGTH, chance)


def build_trajectory(number: int, source: str = "world_facts", right: bool = True, **fields: object) -> Trajectory:
    """A search and an answer, or a puzzle's only turn, in tokens of single characters."""
    said = "." * LENGTH
    if source == "puzzle":
        parts = [
            (Role.ROLE_PROMPT, "Make 6 of 1, 2, 4. "),
            (Role.ROLE_MODEL, f"<think>{said}</think> <answer>x</answer>"),
        ]
        truth = GroundTruth(countdown_target=6, countdown_numbers=[1, 2, 4])
    else:
        parts = [
            (Role.ROLE_PROMPT, f"{number}. Capital of Norway? "),
            (Role.ROLE_MODEL, "<think>hm</think> <search>Norway</search>"),
            (Role.ROLE_ENV, "\n<information>Oslo is its capital.</information>\n"),
            (Role.ROLE_MODEL, f"<think>{said}</think> <answer> Oslo </answer>"),
        ]
        truth = GroundTruth(targets=["Oslo"])
    spans, ids, turns = [], [], []
    for role, text in parts:
        spans.append(Span(role=role, begin=len(ids), end=len(ids) + len(text), text=text))
        ids += encode(text)
        if role == Role.ROLE_MODEL:
            kind = ActionKind.ACTION_KIND_ANSWER if "<answer>" in text else ActionKind.ACTION_KIND_SEARCH
            turns.append(Turn(index=len(turns) + 1, action=kind))
    known = {
        "id": f"run/{source}/test/{number}/0/0",
        "data_source": source,
        "token_ids": ids,
        "prompt_length": spans[0].end,
        "spans": spans,
        "turns": turns,
        "ground_truth": truth,
        "status": Status.STATUS_OK,
        "score": Score(status=Status.STATUS_OK, total=0.8 if right else 0.1),
        "validation_score": Score(status=Status.STATUS_OK, total=float(right)),
    }
    return Trajectory(**{**known, **fields})


@pytest.fixture(scope="session")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The reward service, as the verbs start it; its settings."""
    folder = tmp_path_factory.mktemp("reward")
    overrides = [
        *shift_ports(27000 + os.getpid() % 200 * 20),
        f"run.dir={folder}",
        "reward.routes={world_facts: {name: search_r1_format}, puzzle: {name: countdown}}",
        f"model.path={write_character_model(folder / 'model')}",
        "rollout.max_prompt_length=2000",
        "rollout.max_response_length=500",
        "rollout.engine.max_model_len=4000",
    ]
    with serving.ensure_services(load_settings(None, overrides), Console(quiet=True), (Program.REWARD,)):
        yield overrides


@pytest.fixture
def scripted() -> Iterator[CompletionsServer]:
    with serve_completions(answer_ignorantly) as server:
        yield server


@pytest.fixture
def overrides(reward: list[str], scripted: CompletionsServer) -> list[str]:
    addresses = {"http": scripted.address, "health": scripted.address, "grpc": scripted.grpc_address}
    return [*reward, *(f"rollout.{name}_address={address}" for name, address in addresses.items())]


@pytest.fixture
def settings(overrides: list[str]) -> Settings:
    return load_settings(None, overrides)
