"""All samples of one prompt: each a coroutine that runs the loop at its own pace, then scored together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from forage_common.clients.calls import MalformedReplyError, RefusedError
from forage_common.clients.reward import build_score_item
from forage_common.errors import UnavailableError
from forage_common.settings import Settings
from forage_common.streams.prompt_identity import build_group, with_prompt_identity
from forage_common.telemetry import tracing
from forage_common.telemetry.logs import get_logger
from forage_common.telemetry.tracing import SpanKind
from forage_common.v1.rollout_pb2 import RunStreamResponse
from forage_common.v1.trajectory_pb2 import (
    ActionKind,
    Prompt,
    Purpose,
    Score,
    Status,
    Timings,
    Trajectory,
    TrajectoryGroup,
)
from forage_rollout.clients import Retriever, Reward
from forage_rollout.environments.environment import Environment, EnvironmentFailedError, Episode
from forage_rollout.environments.registry import BUILT_IN, EXPECTED, make
from forage_rollout.loop.generation import Engine, Generation, Request, request
from forage_rollout.loop.tokens import TokenCodec
from forage_rollout.loop.trajectory_builder import Limits, Loop

log = get_logger()
OnEvent = Callable[[RunStreamResponse], None]


class PromptError(ValueError):
    """The prompt itself is at fault; running it again changes nothing."""


@dataclass
class Counts:
    """What an agent has done since it started."""

    trajectories: int = 0
    failed_trajectories: int = 0
    failed_timeout: int = 0
    failed_invalid_input: int = 0
    failed_internal: int = 0
    environment_failures: int = 0
    truncated_trajectories: int = 0
    unfinished_trajectories: int = 0
    turns: int = 0
    searches: int = 0
    invalid_actions: int = 0
    generated_tokens: int = 0
    wait_seconds: float = 0.0
    generate_seconds: float = 0.0
    retrieve_seconds: float = 0.0
    score_seconds: float = 0.0
    samples_in_flight: int = 0


class Agent:
    """Runs prompts. What fails outside leaves a status on the trajectory; a failing engine raises."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        retriever: Retriever,
        reward: Reward,
        codec: TokenCodec,
        end_of_turn: str,
        replica: str,
    ) -> None:
        self._limits = Limits.of(settings.rollout, codec)
        self._timeout_s = settings.rollout.trajectory_timeout_s
        self._endpoint = settings.rollout.engine.endpoint
        self._engine = engine
        self._environments = make(settings, retriever)
        self._reward = reward
        self._codec = codec
        self._end_of_turn = end_of_turn
        self._replica = replica
        self.counts = Counts()

    async def run(self, prompt: Prompt, on_event: OnEvent | None = None) -> TrajectoryGroup:
        """Every sample of the prompt, scored.

        Args:
            on_event: told of each generation as it ends and of each observation as it is shown; must not wait.

        Raises:
            Exception: whatever the engine raised; nothing of the group is kept.
        """
        facts = {"forage.group": prompt.group_uid, "forage.replica": self._replica}
        with tracing.span("rollout.run", facts, kind=SpanKind.SERVER, parent=prompt.traceparent) as span:
            tracing.attach_trace_context(prompt, span)
            return await self._run(prompt, on_event)

    async def _run(self, prompt: Prompt, on_event: OnEvent | None) -> TrajectoryGroup:
        samples = max(0, prompt.samples)
        try:
            ids = await self._prompt_ids(prompt)
        except PromptError as error:
            log.warning("prompt_refused", group=prompt.group_uid, detail=str(error))
            blank = Trajectory(status=Status.STATUS_INVALID_INPUT, status_detail=str(error))
            trajectories = [self._sign(blank, prompt, sample, Timings()) for sample in range(samples)]
        else:
            trajectories = await self._samples(prompt, ids, samples, on_event)
            if prompt.purpose != Purpose.PURPOSE_ASK:  # somebody's own question has no accepted answers
                await self._score(trajectories)
        for trajectory in trajectories:
            self._count(trajectory)
        return build_group(prompt, trajectories)

    async def close(self) -> None:
        """Let go of what the environments hold open."""
        await self._environments.close()

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if self._endpoint and prompt.purpose == Purpose.PURPOSE_TRAIN:
            raise PromptError(
                f"purpose is TRAIN: {self._endpoint} does not serve the policy that is trained: "
                "unset rollout.engine.endpoint"
            )
        if not prompt.timeout_s >= 0:
            raise PromptError(f"timeout_s is {prompt.timeout_s}: expected seconds, or 0 for the service's own limit")
        if prompt.environment and prompt.environment not in BUILT_IN:
            raise PromptError(f"environment is {prompt.environment!r}: expected {EXPECTED}")
        if prompt.token_ids:
            ids = list(prompt.token_ids)
            if max(ids) >= self._codec.size:
                raise PromptError(f"token_ids holds {max(ids)}: the policy's tokenizer has {self._codec.size} tokens")
            return ids
        if not prompt.messages:
            raise PromptError("the prompt has neither messages nor token_ids")
        try:
            return await self._engine.render([{"role": m.role, "content": m.content} for m in prompt.messages])
        except ValueError as error:
            raise PromptError(f"the chat template refuses the prompt: {error}") from error

    async def _samples(
        self, prompt: Prompt, ids: Sequence[int], samples: int, on_event: OnEvent | None
    ) -> list[Trajectory]:
        self.counts.samples_in_flight += samples
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._sample(prompt, ids, sample, on_event)) for sample in range(samples)]
        finally:
            self.counts.samples_in_flight -= samples
            await self._engine.release(_affinity(prompt))
        return [task.result() for task in running]

    async def _sample(
        self, prompt: Prompt, prompt_ids: Sequence[int], sample: int, on_event: OnEvent | None
    ) -> Trajectory:
        with tracing.span("rollout.sample", {"forage.sample": sample}) as span:
            trajectory = await self._run_sample(prompt, prompt_ids, sample, on_event)
            span.set_attributes(
                {
                    "forage.trajectory": trajectory.id,
                    "forage.turns": len(trajectory.turns),
                    "forage.tokens": len(trajectory.loss_mask),
                    "forage.status": Status.Name(trajectory.status),
                }
            )
            if trajectory.status != Status.STATUS_OK:
                tracing.mark_failed(span, trajectory.status_detail)
        return trajectory

    async def _run_sample(
        self, prompt: Prompt, prompt_ids: Sequence[int], sample: int, on_event: OnEvent | None
    ) -> Trajectory:
        timings = Timings()
        if prompt.issued_unix_ms:
            timings.queued_s = max(0.0, time.time() - prompt.issued_unix_ms / 1000)
        begin = time.perf_counter()
        environment = self._environments(prompt.data_source, prompt.environment)
        loop = Loop.start(self._limits, self._codec, prompt_ids, environment, Episode(prompt, sample))
        timeout_s = min(self._timeout_s, prompt.timeout_s or self._timeout_s)
        status: Status.ValueType = Status.STATUS_OK
        detail = ""
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns(loop, prompt, sample, timings, on_event)
        except TimeoutError:
            status = Status.STATUS_TIMEOUT
            limit = "rollout.trajectory_timeout_s" if timeout_s == self._timeout_s else "the prompt's timeout_s"
            detail = f"not finished within {limit} = {timeout_s:g} s"
        except (UnavailableError, RefusedError, MalformedReplyError, EnvironmentFailedError) as error:
            status, detail = _status_of(error), str(error)
            if loop.turns and not loop.observed:  # else its action was answered
                loop.turns[-1].retrieval_status = status
        timings.total_s = time.perf_counter() - begin
        trajectory = loop.trajectory()
        trajectory.status, trajectory.status_detail = status, detail
        return self._sign(trajectory, prompt, sample, timings)

    async def _turns(self, loop: Loop, prompt: Prompt, sample: int, timings: Timings, on_event: OnEvent | None) -> None:
        environment, episode = loop.environment, loop.episode
        while (context := loop.next_context()) is not None:
            with self._failures_of(environment):
                budget = environment.budget(episode)
                length = min(budget.max_tokens, self._limits.max_response_length)
                asked = request(
                    prompt.sampling,
                    context,
                    length,
                    sample,
                    episode.turn,
                    environment.stops,
                    budget.min_tokens,
                    _affinity(prompt),
                )
            start = time.perf_counter()
            try:
                generation = await self._generate(asked, episode.turn)
            finally:
                timings.generate_s += time.perf_counter() - start
            with self._failures_of(environment):
                action = loop.add_generation(generation)
            if on_event is not None:
                acted = RunStreamResponse(sample=sample, text=loop.spans[-1].text)
                acted.acted.CopyFrom(loop.turns[-1])
                on_event(acted)
            if not loop.searching or action.kind == ActionKind.ACTION_KIND_ANSWER:
                continue
            if action.kind == ActionKind.ACTION_KIND_INVALID:
                with self._failures_of(environment):
                    loop.add_feedback()
            else:
                start = time.perf_counter()
                try:
                    facts: tracing.Attributes = {"forage.turn": episode.turn, "forage.tag": action.tag}
                    with self._failures_of(environment), tracing.span("rollout.respond", facts):
                        loop.add_observation(await environment.respond(action, episode))
                finally:
                    timings.retrieve_s += time.perf_counter() - start
            if on_event is not None and loop.observed:
                observed = RunStreamResponse(sample=sample, text=loop.observed)
                observed.observed.CopyFrom(loop.turns[-1])
                on_event(observed)

    async def _generate(self, asked: Request, turn: int) -> Generation:
        facts: tracing.Attributes = {"forage.turn": turn, "forage.context_tokens": len(asked.token_ids)}
        with tracing.span("rollout.generate", facts, kind=SpanKind.CLIENT) as span:
            generation = await self._engine.generate(asked)
            span.set_attributes(
                {"forage.tokens": len(generation.token_ids), "forage.hit_length": generation.hit_length}
            )
            if generation.versions:
                span.set_attributes({"forage.policy_version": generation.versions[-1][0]})
            return generation

    @contextmanager
    def _failures_of(self, environment: Environment) -> Iterator[None]:
        """Errors of a service pass; whatever else an environment's own code raises is named after it and counted."""
        try:
            yield
        except (UnavailableError, RefusedError, MalformedReplyError):
            raise
        except Exception as error:
            self.counts.environment_failures += 1
            name = type(environment).__name__
            log.exception("environment_failed", environment=name)
            raise EnvironmentFailedError(f"environment {name}: {type(error).__name__}: {error}") from error

    def _sign(self, trajectory: Trajectory, prompt: Prompt, sample: int, timings: Timings) -> Trajectory:
        whole = with_prompt_identity(trajectory, prompt, sample)
        whole.timings.CopyFrom(timings)
        whole.replica = self._replica
        return whole

    async def _score(self, trajectories: Sequence[Trajectory]) -> None:
        whole = [t for t in trajectories if t.status == Status.STATUS_OK]
        if not whole:
            return
        items = [build_score_item(trajectory, self._end_of_turn) for trajectory in whole]
        start = time.perf_counter()
        try:
            scored = await self._reward.score(items)
        except (UnavailableError, grpc.RpcError, MalformedReplyError) as error:
            log.warning("scoring_failed", group=whole[0].group_uid, detail=str(error))
            for trajectory in whole:
                trajectory.status, trajectory.status_detail = _status_of(error), str(error)
                trajectory.score.CopyFrom(Score(status=trajectory.status, detail=str(error)))
        else:
            for trajectory, item in zip(whole, scored, strict=True):
                trajectory.score.CopyFrom(item.score)
                trajectory.validation_score.CopyFrom(item.validation_score)
                if item.score.status not in (Status.STATUS_OK, Status.STATUS_ABSTAIN):
                    trajectory.status, trajectory.status_detail = item.score.status, item.score.detail
        for trajectory in whole:
            trajectory.timings.score_s = time.perf_counter() - start

    def _count(self, trajectory: Trajectory) -> None:
        counts, timings = self.counts, trajectory.timings
        counts.trajectories += 1
        counts.failed_trajectories += trajectory.status != Status.STATUS_OK
        counts.failed_timeout += trajectory.status == Status.STATUS_TIMEOUT
        counts.failed_invalid_input += trajectory.status == Status.STATUS_INVALID_INPUT
        counts.failed_internal += trajectory.status == Status.STATUS_INTERNAL
        counts.truncated_trajectories += trajectory.truncated
        counts.unfinished_trajectories += not trajectory.finished
        counts.turns += len(trajectory.turns)
        counts.searches += sum(turn.executed for turn in trajectory.turns)
        counts.invalid_actions += len(trajectory.turns) - trajectory.valid_actions
        counts.generated_tokens += sum(trajectory.loss_mask)
        counts.wait_seconds += timings.queued_s
        counts.generate_seconds += timings.generate_s
        counts.retrieve_seconds += timings.retrieve_s
        counts.score_seconds += timings.score_s


def _affinity(prompt: Prompt) -> str:
    return f"{prompt.run_id}/{prompt.group_uid}"


def _status_of(error: Exception) -> Status.ValueType:
    """The status of a trajectory whose call to another service failed."""
    if isinstance(error, UnavailableError):
        return Status.STATUS_TIMEOUT
    refused = isinstance(error, RefusedError)
    refused |= isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.INVALID_ARGUMENT
    return Status.STATUS_INVALID_INPUT if refused else Status.STATUS_INTERNAL
