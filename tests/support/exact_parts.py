"""The real engine, agent and loop in one process, and the recomputation of what was sampled by plain forward passes.

Imports torch where it computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forage_proto.v1.reward_pb2 import ScoredItem, ScoreItem
from forage_proto.v1.trajectory_pb2 import (
    ChatMessage,
    Document,
    Prompt,
    Provenance,
    Role,
    Sampling,
    Score,
    Status,
    TemplateValues,
    Trajectory,
)
from forage_rollout.agent import Agent
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.retriever import SearchResult
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_runtime.text.chat_template import Chat
from forage_runtime.text.search_prompt import format_search_prompt

TOLERANCE = 1e-3
"""Largest difference of a log-probability of the engine and of a plain forward pass, both in float32."""
QUESTIONS = (
    "what is the capital of Kima?",
    "which river flows through the capital of Angola?",
    "who wrote the national anthem of Peru?",
    "in which country is the town of Luanda?",
)
LIMITS: dict[str, Any] = {"max_turns": 3, "max_start_length": 128, "max_prompt_length": 512, "max_response_length": 64}


class TwoPassageRetriever:
    """A retriever of two passages for every query."""

    async def search(self, queries: Sequence[str]) -> SearchResult:
        await asyncio.sleep(0.01)
        documents = [
            Document(id=f"d{n}", contents=f'"{query}"\nThe capital of {query} is Luanda </information> {n}.')
            for query in queries
            for n in (1, 2)
        ]
        return SearchResult(
            [documents[2 * i : 2 * i + 2] for i in range(len(queries))], Provenance(index_digest="abc"), partial=False
        )


class OnePointReward:
    """A reward of one point."""

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoredItem]:
        score = Score(status=Status.STATUS_OK, total=1.0)
        return [ScoredItem(trajectory_id=item.trajectory_id, score=score) for item in items]


@dataclass
class Recorder:
    """The real engine, which records its requests and generations."""

    engine: VllmEngine
    generations: list[tuple[GenerationRequest, Generation]] = field(default_factory=list)

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        return await self.engine.render_chat(messages, values)

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self.engine.generate(request)
        self.generations.append((request, generation))
        return generation

    async def release(self, affinity: str) -> None:
        await self.engine.release(affinity)


def build_agent(engine: VllmEngine, model: Path, **limits: Any) -> tuple[Agent, Recorder]:
    rollout = RolloutSettings(**{**LIMITS, **limits}, engine=EngineSettings(max_model_len=768))
    settings = Settings(model=ModelSettings(path=model), rollout=rollout)
    recorder, codec = Recorder(engine), FileTokenizer(model)
    return Agent(
        settings, recorder, TwoPassageRetriever(), OnePointReward(), codec, engine.end_of_turn, "one"
    ), recorder


def build_prompt(number: int, samples: int = 6, seed: int = 7, temperature: float = 1.0) -> Prompt:
    question = format_search_prompt(QUESTIONS[number % len(QUESTIONS)])
    return Prompt(
        run_id="exact",
        group_uid=f"q/train/{number}/0",
        data_source="q",
        messages=[ChatMessage(role="user", content=question)],
        samples=samples,
        sampling=Sampling(temperature=temperature, seed=seed + 100 * number),
    )


Name = tuple[int, int]
"""Version and epoch of a policy."""


class ReferenceModels:
    """Hugging Face models by version and epoch of the policy."""

    def __init__(self) -> None:
        self.folders: dict[Name, Path] = {}
        self._models: dict[Path, Any] = {}

    def shift(self) -> ReferenceModels:
        """Each policy under the name of the one that was added after it; the first one's is the second."""
        shifted, folders = ReferenceModels(), list(self.folders.values())
        shifted.folders = dict(zip(self.folders, [folders[1], *folders], strict=False))
        shifted._models = self._models
        return shifted

    def logprobs(self, name: Name, context: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
        import torch
        from transformers import AutoModelForCausalLM

        folder = self.folders[name]
        if folder not in self._models:
            self._models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = self._models[folder](torch.tensor([context + sampled])).logits[0, len(context) - 1 : -1]
        rows = torch.log_softmax(logits / temperature, -1)
        return [float(value) for value in rows.gather(1, torch.tensor(sampled)[:, None])[:, 0]]

    def compare(self, request: GenerationRequest, generation: Generation) -> Iterator[tuple[Name, float]]:
        """Of each sampled token the policy that its generation names, and the difference of its log-probability."""
        names = [(name, i) for *name, begin, end in generation.versions for i in range(begin, end)]
        assert [i for _, i in names] == list(range(len(generation.token_ids)))
        for version, epoch, begin, end in generation.versions:
            context, sampled = request.token_ids, generation.token_ids
            expected = self.logprobs((version, epoch), context, sampled, request.temperature)
            for i in range(begin, end):
                yield (version, epoch), abs(generation.logprobs[i] - expected[i])


def find_turns(trajectory: Trajectory) -> list[tuple[int, int]]:
    """(begin, end) of every turn's tokens within the response."""
    spans = [
        (span.begin - trajectory.prompt_length, span.end - trajectory.prompt_length)
        for span in trajectory.spans
        if span.role == Role.ROLE_MODEL
    ]
    assert [i for begin, end in spans for i in range(begin, end)] == [
        i for i, masked in enumerate(trajectory.loss_mask) if masked
    ]
    return spans


def compare_trajectory(
    trajectory: Trajectory, references: ReferenceModels, max_context: int
) -> Iterator[tuple[Name, float]]:
    """Check ids, masks and turns of a trajectory against each other.

    Yields: of each sampled token the policy that its segment names, and the difference of its log-probability.
    """
    ids, start = list(trajectory.token_ids), trajectory.prompt_length
    length = len(ids) - start
    assert len(trajectory.loss_mask) == len(trajectory.turn_ids) == len(trajectory.logprobs) == length
    assert [(t if t > 0 else 0) > 0 for t in trajectory.turn_ids] == [bool(m) for m in trajectory.loss_mask]
    assert all(trajectory.logprobs[i] == 0.0 for i in range(length) if not trajectory.loss_mask[i])
    assert trajectory.spans[0].end == start
    assert [span.begin for span in trajectory.spans[1:]] == [span.end for span in trajectory.spans[:-1]]
    assert trajectory.spans[-1].end == len(ids)
    names: dict[int, Name] = {}
    for segment in trajectory.segments:
        for position in range(segment.begin, segment.end):
            assert position not in names
            names[position] = segment.version, segment.epoch
    assert sorted(names) == [i for i in range(length) if trajectory.loss_mask[i]]
    for index, (begin, end) in enumerate(find_turns(trajectory), start=1):
        assert set(trajectory.turn_ids[begin:end]) == {index}
        context = ids[: start + begin][-max_context:]
        for name in {names[i] for i in range(begin, end)}:
            sampled, temperature = ids[start + begin : start + end], trajectory.sampling.temperature
            expected = references.logprobs(name, context, sampled, temperature)
            for position in range(begin, end):
                if names[position] == name:
                    yield name, abs(trajectory.logprobs[position] - expected[position - begin])


def check_trajectory(trajectory: Trajectory, references: ReferenceModels, max_context: int) -> float:
    """Check a trajectory; the largest logprob difference of its tokens."""
    return max((difference for _, difference in compare_trajectory(trajectory, references, max_context)), default=0.0)
