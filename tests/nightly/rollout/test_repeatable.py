"""A repeatable engine samples the same tokens, to the bit, whatever else it does and whatever fails around it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from forage_proto.v1.reward_pb2 import ScoredItem, ScoreItem
from forage_proto.v1.trajectory_pb2 import (
    ChatMessage,
    Document,
    Prompt,
    Provenance,
    Sampling,
    Score,
    Status,
    Trajectory,
    TrajectoryGroup,
)
from forage_rollout.agent import Agent
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Generation, GenerationRequest
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.retriever import SearchResult
from forage_runtime.errors import UnavailableError
from forage_runtime.settings import Settings, load_settings
from forage_runtime.text.search_prompt import format_search_prompt

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
STOPS = ("</search>", "</answer>")
TEXT = "the capital of France is Paris, the search for an answer"
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.05,
}
GROUPS, SAMPLES = 12, 10


class UnreliableRetriever:
    """A retriever of one passage for a query, which a share of its calls never reaches."""

    def __init__(self, failing: float) -> None:
        self._failing = failing
        self._chance = random.Random(1)

    async def search(self, queries: Sequence[str]) -> SearchResult:
        await asyncio.sleep(0.002 * self._chance.random())
        if self._chance.random() < self._failing:
            raise UnavailableError("the retriever is down")
        found = [[Document(id=query, contents=f'"{query}"\nIt is the capital of {query}.')] for query in queries]
        return SearchResult(found, Provenance(index_digest="abc"), partial=False)


class UnreliableReward:
    """A reward of one point, which fails for a share of the trajectories."""

    def __init__(self, failing: float) -> None:
        self._failing = failing
        self._chance = random.Random(2)

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoredItem]:
        fails = [self._chance.random() < self._failing for _ in items]
        scores = [Score(status=Status.STATUS_INTERNAL if one else Status.STATUS_OK, total=1.0) for one in fails]
        return [ScoredItem(trajectory_id=i.trajectory_id, score=s) for i, s in zip(items, scores, strict=True)]


@pytest.fixture(scope="module")
def settings(repository: Path) -> Settings:
    return build_settings(repository / "models/tiny-policy")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(settings: Settings) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(settings)
    yield engine
    engine.shutdown()


def build_settings(model: Path) -> Settings:
    overrides = ["run.repeatable=true", "trainer.max_staleness=0", "rollout.weights.update=drain"]
    sizes = ["rollout.engine.max_num_seqs=1", "rollout.engine.max_model_len=512", "rollout.max_prompt_length=448"]
    return load_settings(None, [f"model.path={model}", *overrides, *sizes, "rollout.max_response_length=48"], {})


def draw_requests(count: int) -> list[GenerationRequest]:
    """Contexts of random lengths; the second half share their first tokens."""
    chance = random.Random(0)
    shared = [chance.randrange(3, 300) for _ in range(96)]
    requests = []
    for number in range(count):
        own = [chance.randrange(3, 300) for _ in range(chance.randint(20, 200))]
        context = shared + own[:60] if number >= count // 2 else own
        requests.append(GenerationRequest(context, 24, 1.0, 1.0, -1, chance.randrange(1, 2**40), STOPS))
    return requests


async def generate(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return list(await asyncio.gather(*[engine.generate(request) for request in requests]))


async def test_tokens_and_logprobs_do_not_depend_on_what_else_is_sampled(tmp_path: Path) -> None:
    """With a model so wide that log-probabilities of an engine that is not repeatable differ in their last bits."""
    from random_model import write_random_model  # imports torch

    engine = VllmEngine(build_settings(write_random_model(tmp_path / "wide", text=TEXT, **WIDE)))
    try:
        requests = draw_requests(16)
        together = await generate(engine, requests)
        assert len({tuple(generation.token_ids) for generation in together}) == len(requests)
        order = random.Random(3).sample(range(len(requests)), len(requests))
        shuffled = await generate(engine, [requests[number] for number in order])
        assert shuffled == [together[number] for number in order]
        alone = [await engine.generate(requests[number]) for number in order[:8]]
        assert alone == [together[number] for number in order[:8]]
    finally:
        engine.shutdown()


def build_prompt(number: int) -> Prompt:
    return Prompt(
        run_id="repeat",
        group_uid=f"q/train/{number}/0",
        data_source="q",
        messages=[ChatMessage(role="user", content=format_search_prompt(f"what is the capital of Kima{number}?"))],
        samples=SAMPLES,
        sampling=Sampling(temperature=1.0, seed=1000 * (number + 1)),
    )


async def sample(engine: VllmEngine, settings: Settings, failing: float) -> list[Trajectory]:
    codec = FileTokenizer(settings.model.path)
    agent = Agent(
        settings, engine, UnreliableRetriever(failing), UnreliableReward(failing), codec, engine.end_of_turn, "one"
    )
    groups: list[TrajectoryGroup] = await asyncio.gather(*[agent.run_group(build_prompt(n)) for n in range(GROUPS)])
    return [trajectory for group in groups for trajectory in group.trajectories]


async def test_failures_around_a_survivor_do_not_change_it(engine: VllmEngine, settings: Settings) -> None:
    sound = {trajectory.id: trajectory for trajectory in await sample(engine, settings, 0.0)}
    assert {trajectory.status for trajectory in sound.values()} == {Status.STATUS_OK}
    among_failures = await sample(engine, settings, 0.9)
    survivors = [trajectory for trajectory in among_failures if trajectory.status == Status.STATUS_OK]
    assert 0 < len(survivors) < 0.15 * len(among_failures)
    for survivor in survivors:
        whole = sound[survivor.id]
        for name in ("token_ids", "loss_mask", "turn_ids", "logprobs", "segments", "score"):
            assert getattr(survivor, name) == getattr(whole, name), name
