"""Trajectories for a file of questions, sampled by a rollout service."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from forage_proto.v1.trajectory_pb2 import ChatMessage, Prompt, Purpose, Sampling, Trajectory
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.concurrency import map_concurrently
from forage_runtime.clients.rollout import RolloutClient
from forage_runtime.errors import DataError, UserError
from forage_runtime.files.template_values import build_template_values
from forage_runtime.settings import Settings
from forage_runtime.text.search_prompt import format_search_prompt

if TYPE_CHECKING:  # questions need pyarrow, which the rollout service's environment lacks
    from forage_records.questions import Question


def build_prompts(
    questions: Sequence[Question], settings: Settings, samples: int, greedy: bool, seed: int
) -> list[Prompt]:
    """Build one prompt per question; no two samples share a seed."""
    rollout, template = settings.rollout, build_template_values(settings)
    return [
        Prompt(
            run_id=settings.run.id,
            group_uid=question.uid(0),
            data_source=question.data_source,
            messages=question.messages,
            ground_truth=question.ground_truth,
            samples=samples,
            sampling=Sampling(
                temperature=0.0 if greedy else rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                seed=seed + index * samples,
            ),
            purpose=Purpose.PURPOSE_VALIDATION,
            template=template,
        )
        for index, question in enumerate(questions)
    ]


def check_question(question: str) -> None:
    """Check that there is something to answer.

    Raises:
        UserError: there is not.
    """
    if not question.strip():
        raise UserError('the question is empty: write one, such as "What is the capital of Mongolia?"')


def build_ask_prompt(settings: Settings, question: str, temperature: float = 0.0, environment: str = "") -> Prompt:
    """Build the prompt that asks one question for one trajectory; raises as `check_question`."""
    check_question(question)
    return Prompt(
        run_id=settings.run.id,
        group_uid=f"ask/{time.time_ns()}",
        data_source=next(iter(settings.reward.routes)),
        messages=[ChatMessage(role="user", content=format_search_prompt(question))],
        samples=1,
        sampling=Sampling(temperature=temperature),
        purpose=Purpose.PURPOSE_ASK,
        environment=environment,
        template=build_template_values(settings),
    )


def trajectory_ids(prompt: Prompt) -> set[str]:
    """The ids that the trajectories of a prompt will have."""
    return {f"{prompt.run_id}/{prompt.group_uid}/{sample}" for sample in range(prompt.samples)}


async def sample_groups(work: Iterable[Prompt], settings: Settings) -> AsyncGenerator[list[Trajectory], None]:
    """Yield the trajectories of each prompt in order of completion, `rollout.max_groups_in_flight` prompts at a time.

    Raises:
        DataError: the service rejects a prompt.
        UnavailableError: the service does not answer.
    """
    async with RolloutClient(settings) as rollout:

        async def run(prompt: Prompt) -> list[Trajectory]:
            try:
                return list((await rollout.run(prompt)).trajectories)
            except RefusedError as error:
                raise DataError(f"the rollout service rejects question {prompt.group_uid}: {error}") from error

        async with aclosing(map_concurrently(work, run, settings.rollout.max_groups_in_flight)) as answered:
            async for _, trajectories in answered:
                yield trajectories
