"""Probes of trajectories, through the rollout service's completions and the reward service."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass

from forage_probe.completions import CompletionsClient
from forage_probe.contexts import (
    CONNECTIVE,
    NothingToProbeError,
    Thought,
    build_context,
    derive_seed,
    find_thought,
    select_turns,
)
from forage_probe.cot import kept_lengths
from forage_probe.judge import ANSWER_CLOSE, UnjudgedError, find_correct, is_correct, parse_answer
from forage_proto.v1.probe_pb2 import AnswerCount, Probed, ProbePoint
from forage_proto.v1.trajectory_pb2 import Status, Trajectory
from forage_runtime.clients.concurrency import map_concurrently
from forage_runtime.clients.reward import RewardClient
from forage_runtime.errors import SettingsError
from forage_runtime.files.model_folder import read_end_of_turn
from forage_runtime.settings import Settings
from forage_runtime.text.token_texts import TokenTexts

MAX_TOKENS = 64
"""Most tokens of a continuation."""


@dataclass(frozen=True)
class ProbePlan:
    """The parameters of a probe.

    Attributes:
        points: truncations of the thought, besides the empty one.
        samples: continuations per truncation.
        seed: base seed, from which the seed of each point of each turn is derived.
    """

    points: int = 10
    samples: int = 50
    seed: int = 0


class Prober:
    """Probes trajectories of the policy that the settings' services serve; `model.path` is its folder.

    Example:
        async with Prober(settings) as prober:
            probed = await prober.probe(trajectory)
    """

    def __init__(self, settings: Settings, plan: ProbePlan = ProbePlan()) -> None:
        """Prepare; the connections are opened on entering the context.

        Raises:
            DataError: the model folder has no tokenizer.
            SettingsError: `rollout.auth_token_file` cannot be read, or LoRA adapters are served.
        """
        rank = settings.rollout.engine.max_lora_rank
        if rank:
            raise SettingsError(
                f"rollout.engine.max_lora_rank is {rank}: completions are sampled from the model without its adapter, "
                "and a probe would measure another policy; serve an exported one with rank 0"
            )
        self._plan = plan
        self._settings = settings.rollout
        self._texts = TokenTexts(settings.model.path)
        self._end_of_turn = read_end_of_turn(settings.model.path)
        self._reward = RewardClient(settings)
        self._completions = CompletionsClient(settings)
        self._connective: list[int] = []
        # Enough to fill the engine: more would only wait there, and evict each other's prefixes from its cache.
        self._requests = asyncio.Semaphore(math.ceil(settings.rollout.engine.max_num_seqs / plan.samples))

    async def probe(self, trajectory: Trajectory, turn: int | None = None) -> Probed:
        """Probe one turn of a trajectory, by default the one with the answer, or the last one if none has.

        The result has no points and a status with the reason if the turn cannot be probed or scored.

        Raises:
            UnavailableError: a service does not answer within its deadline.
            RefusedError: a service rejects a request.
            DataError: the trajectory was sampled by a policy with another vocabulary.
        """
        began = time.perf_counter()
        if turn is None:
            turn = next(iter(select_turns(trajectory, every=False)), 1)
        probed = Probed(
            trajectory_id=trajectory.id,
            turn=turn,
            status=Status.STATUS_OK,
            correct=is_correct(trajectory.score, trajectory.validation_score),
            data_source=trajectory.data_source,
        )
        try:
            thought = find_thought(trajectory, turn, self._texts, self._settings)
            probed.boundary, probed.cot_begin, probed.cot_end = thought.boundary, thought.begin, thought.end
            probed.points.extend(await self._points(trajectory, thought))
        except NothingToProbeError as error:
            probed.status, probed.status_detail = Status.STATUS_INVALID_INPUT, str(error)
        except UnjudgedError as error:
            probed.status, probed.status_detail = error.status, str(error)
        probed.seconds = time.perf_counter() - began
        return probed

    async def _points(self, trajectory: Trajectory, thought: Thought) -> list[ProbePoint]:
        """Probe all points, the whole thought first: then its prefixes are cached and the others run together."""
        lengths = kept_lengths(thought.length, self._plan.points)

        async def probe(number: int) -> ProbePoint:
            return await self._point(trajectory, thought, number, lengths[number])

        *shorter, whole = range(len(lengths))
        points = {whole: await probe(whole)}
        async with aclosing(map_concurrently(shorter, probe, len(shorter))) as probing:
            async for number, point in probing:
                points[number] = point
        return [points[number] for number in range(len(lengths))]

    async def _point(self, trajectory: Trajectory, thought: Thought, number: int, kept: int) -> ProbePoint:
        ids = build_context(trajectory, thought, kept, self._connective)
        limit = self._completions.max_model_len
        max_tokens = MAX_TOKENS if limit is None else min(MAX_TOKENS, limit - len(ids))
        if max_tokens < 1:
            raise NothingToProbeError(f"{len(ids)} tokens of context leave no room for an answer within {limit}")
        samples = self._plan.samples
        seed = derive_seed(self._plan.seed, trajectory.id, thought.turn, number)
        async with self._requests:
            continuations = await self._completions.sample(ids, samples, seed, max_tokens, ANSWER_CLOSE)
        correct = await find_correct(self._reward, trajectory, thought, continuations.texts, self._end_of_turn)
        answers = Counter(
            answer for text in continuations.texts if (answer := parse_answer(trajectory, text)) is not None
        )
        ordered = sorted(answers.items(), key=lambda answer: (-answer[1], answer[0]))
        return ProbePoint(
            kept=kept,
            samples=samples,
            correct=sum(text in correct for text in continuations.texts),
            answers=[AnswerCount(answer=answer, count=count) for answer, count in ordered],
            context_tokens=len(ids),
            # The engine reports the cached tokens of one sample; the first sample may have found fewer, even none.
            cached_tokens=continuations.cached_tokens * (samples - 1),
            generated_tokens=continuations.generated_tokens,
        )

    async def __aenter__(self) -> Prober:
        await self._completions.open()
        self._connective = await self._completions.encode(CONNECTIVE)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._completions.close()
