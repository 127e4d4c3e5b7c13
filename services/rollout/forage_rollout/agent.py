"""All samples of one prompt: each is a coroutine that runs the loop at its own pace; the group is scored together."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from forage_proto.v1.rollout_pb2 import RunStreamResponse
from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    Prompt,
    Purpose,
    Score,
    Status,
    TemplateValues,
    Timings,
    Trajectory,
    TrajectoryGroup,
)
from forage_queue.streams.prompt_identity import build_group, with_prompt_identity
from forage_rollout.environments.environment import EnvironmentFailedError, Episode
from forage_rollout.environments.external import NOT_DRAINED, External
from forage_rollout.environments.loading import BUILT_IN
from forage_rollout.environments.registry import AnyEnvironment, build_name, end_episode, load_environments, settle
from forage_rollout.loop.generation import (
    Engine,
    Generation,
    GenerationRequest,
    RenderedPrompt,
    build_request,
    rank_generation,
)
from forage_rollout.loop.tokens import FileTokenizer
from forage_rollout.loop.trajectory_builder import Limits, TrajectoryBuilder
from forage_rollout.prompt_ids import PromptError, encode_prompt
from forage_rollout.sessions.session import WorkerLostError
from forage_rollout.sessions.table import SessionTable
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.clients.retriever import RetrieverClient, searching_for
from forage_runtime.clients.reward import RewardClient, build_score_item
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.files.template_values import build_template_values
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.tracing import SpanKind
from forage_runtime.telemetry.waits import waiting
from forage_runtime.text.characters import replace_halves
from forage_runtime.text.chat_template import Chat
from forage_runtime.text.enums import name_value

log = get_logger()
OnEvent = Callable[[RunStreamResponse], None]
MOST_WORKERS = 5
"""Workers that may fall silent under one sample: it may be what they die of."""


class _PolicyChangedError(Exception):
    """Another policy has sampled a generation than those before it in its trajectory."""


@dataclass
class _Group:
    """A prompt whose samples run.

    Attributes:
        limit_s: time limit of each trajectory, from the begin of the group on.
        deadline: when it is over, by the clock of the event loop.
        ended: samples that are finished, however.
    """

    prompt: Prompt
    samples: int
    on_event: OnEvent | None
    limit_s: float
    deadline: float
    ended: int = 0


@dataclass
class AgentCounts:
    """Totals since an agent started."""

    trajectories: int = 0
    failed_trajectories: int = 0
    failed_timeout: int = 0
    failed_invalid_input: int = 0
    failed_internal: int = 0
    environment_failures: int = 0
    restarted_trajectories: int = 0
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
    sessions_waiting: int = 0
    sessions_repeated: int = 0
    session_tokens_lost: int = 0


class Agent:
    """Runs prompts.

    A failing retriever, reward or environment leaves a status on the trajectory, which keeps it out of loss and
    baseline: a failure is never a reward of 0. A generation whose engine dies is asked of another one; what else an
    engine raises ends the group, and the dispatcher runs it again.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        retriever: RetrieverClient,
        reward: RewardClient,
        codec: FileTokenizer,
        end_of_turn: str,
        replica: str,
        sessions: SessionTable | None = None,
    ) -> None:
        """
        Args:
            sessions: where workers find those of this agent; None: a table of its own.
        """
        self._limits = Limits.from_settings(settings.rollout, codec)
        self._timeout_s = settings.rollout.trajectory_timeout_s
        self._endpoint = settings.rollout.engine.endpoint
        self._template = build_template_values(settings)
        self._is_draining = settings.rollout.weights.update == "drain"
        self._engine = engine
        self._environments = load_environments(settings, retriever)
        self._reward = reward
        self._codec = codec
        self._end_of_turn = end_of_turn
        self._replica = replica
        self.sessions = sessions or SessionTable(replica)
        self.counts = AgentCounts()

    async def run_group(self, prompt: Prompt, on_event: OnEvent | None = None) -> TrajectoryGroup:
        """Run and score every sample of the prompt.

        Args:
            on_event: called with each generation and each observation as it ends; must not block.

        Raises:
            Exception: whatever the engine raised; nothing of the group is kept.
        """
        attributes = {"forage.group": prompt.group_uid, "forage.replica": self._replica}
        with tracing.span("rollout.run", attributes, kind=SpanKind.SERVER, parent=prompt.traceparent) as span:
            tracing.attach_trace_context(prompt, span)
            return await self._run_group(prompt, on_event)

    async def _run_group(self, prompt: Prompt, on_event: OnEvent | None) -> TrajectoryGroup:
        limit_s = min(self._timeout_s, prompt.timeout_s or self._timeout_s)
        deadline = asyncio.get_running_loop().time() + limit_s
        group = _Group(prompt, max(0, prompt.samples), on_event, limit_s, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                self._check_sessions(prompt)
                rendered = await encode_prompt(prompt, self._codec, self._engine, self._template, self._endpoint)
        except PromptError as error:
            log.warning("prompt_refused", group=prompt.group_uid, detail=str(error))
            trajectories = self._fail_all(group, Status.STATUS_INVALID_INPUT, str(error))
        except TimeoutError:
            trajectories = self._fail_all(
                group, Status.STATUS_TIMEOUT, f"{self._name_limit(group)}: no engine has rendered its chat"
            )
        else:
            trajectories = await self._run_samples(group, rendered)
            if prompt.purpose != Purpose.PURPOSE_ASK:  # a user's question has no accepted answers to score against
                await self._score_trajectories(trajectories)
        for trajectory in trajectories:
            self._count_trajectory(trajectory)
        return build_group(prompt, trajectories)

    async def close(self) -> None:
        """Close the connections and files of the environments."""
        await self._environments.close()

    def _check_sessions(self, prompt: Prompt) -> None:
        """Return if the prompt can be run, as far as its samples are sessions.

        Raises:
            PromptError: it cannot.
        """
        if prompt.environment and prompt.environment not in BUILT_IN:
            return  # refused by `encode_prompt`
        if not isinstance(self._environments.select(prompt.data_source, prompt.environment), External):
            return
        if self._is_draining:
            raise PromptError(f"environment external: {NOT_DRAINED}")
        if prompt.purpose == Purpose.PURPOSE_ASK:
            raise PromptError("environment external: its agent is a worker's, which answers no user's questions")
        if not prompt.messages:
            raise PromptError("environment external: the prompt has token_ids, and an agent outside needs messages")

    def _fail_all(self, group: _Group, status: Status.ValueType, detail: str) -> list[Trajectory]:
        failed = Trajectory(status=status, status_detail=detail)
        return [self._complete(failed, group.prompt, sample, Timings()) for sample in range(group.samples)]

    def _name_limit(self, group: _Group) -> str:
        limit = "rollout.trajectory_timeout_s" if group.limit_s == self._timeout_s else "the prompt's timeout_s"
        return f"not finished within {limit} = {group.limit_s:g} s"

    async def _run_samples(self, group: _Group, rendered: RenderedPrompt) -> list[Trajectory]:
        samples = group.samples
        self.counts.samples_in_flight += samples
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._trace_sample(group, rendered, sample)) for sample in range(samples)]
        finally:
            self.counts.samples_in_flight -= samples
            # Also after a failure: in drain mode an update of the weights waits for the group's lease.
            await self._engine.release(_build_affinity(group.prompt))
        return [task.result() for task in running]

    async def _trace_sample(self, group: _Group, rendered: RenderedPrompt, sample: int) -> Trajectory:
        with tracing.span("rollout.sample", {"forage.sample": sample}) as span:
            trajectory = await self._run_sample(group, rendered, sample)
            span.set_attributes(
                {
                    "forage.trajectory": trajectory.id,
                    "forage.turns": len(trajectory.turns),
                    "forage.tokens": len(trajectory.loss_mask),
                    "forage.status": name_value(Status, trajectory.status, whole=True),
                }
            )
            if trajectory.status != Status.STATUS_OK:
                tracing.mark_failed(span, trajectory.status_detail)
        return trajectory

    async def _run_sample(self, group: _Group, rendered: RenderedPrompt, sample: int) -> Trajectory:
        prompt, timings = group.prompt, Timings()
        if prompt.issued_unix_ms:
            timings.queued_s = max(0.0, time.time() - prompt.issued_unix_ms / 1000)
        begin = time.perf_counter()
        environment = self._environments.select(prompt.data_source, prompt.environment)
        has_ended, lost = False, 0
        while not has_ended:
            episode = Episode(prompt, sample)
            builder = TrajectoryBuilder.start(self._limits, self._codec, rendered, environment, episode)
            status: Status.ValueType = Status.STATUS_OK
            detail, has_ended = "", True
            try:
                if isinstance(environment, External):
                    await self._run_session(builder, timings, group, environment)
                else:
                    async with asyncio.timeout_at(group.deadline):
                        await self._run_turns(builder, timings, group)
            except _PolicyChangedError:
                has_ended = False
                self.counts.restarted_trajectories += 1
            except WorkerLostError:
                lost += 1
                has_ended = lost == MOST_WORKERS
                self.counts.sessions_repeated += 1
                self.counts.session_tokens_lost += sum(builder.loss_mask)
                status, detail = Status.STATUS_INTERNAL, f"{lost} workers fell silent, one after the other"
            except TimeoutError:
                status, detail = Status.STATUS_TIMEOUT, self._name_limit(group)
            except (UnavailableError, RefusedError, MalformedReplyError, EnvironmentFailedError) as error:
                # A lone surrogate, which an environment may quote, is in no message.
                status, detail = _find_status(error), replace_halves(str(error))
                if builder.turns and not builder.last_observation:  # else the last action was answered
                    builder.turns[-1].retrieval_status = status
            finally:
                end_episode(environment, episode)
        group.ended += 1
        timings.total_s = time.perf_counter() - begin
        trajectory = builder.build()
        trajectory.status, trajectory.status_detail = status, detail
        return self._complete(trajectory, prompt, sample, timings)

    async def _run_turns(self, builder: TrajectoryBuilder, timings: Timings, group: _Group) -> None:
        """Generate and act until the trajectory ends.

        Raises:
            _PolicyChangedError: in drain mode, where nobody has seen a part of the trajectory yet.
        """
        environment, episode, on_event = builder.environment, builder.episode, group.on_event
        prompt, sample = episode.prompt, episode.sample
        while (context := builder.next_context()) is not None:
            with self._wrap_errors_of(environment):
                budget = await settle(environment.budget(episode))
                if budget.min_tokens and prompt.purpose == Purpose.PURPOSE_TRAIN:
                    # The engine samples without the tokens that would end the generation; the trainer scores among all.
                    raise ValueError(f"{budget}: what is sampled with min_tokens cannot be trained on; leave it out")
                length = min(budget.max_tokens, self._limits.max_response_length)
                request = build_request(
                    prompt.sampling,
                    context,
                    length,
                    sample,
                    episode.turn,
                    environment.stops,
                    budget.min_tokens,
                    _build_affinity(prompt),
                    self._rank(group, len(context)),
                )
            start = time.perf_counter()
            try:
                generation = await self._generate(request, episode.turn)
            finally:
                timings.generate_s += time.perf_counter() - start
            if self._is_draining and on_event is None and _count_policies(builder, generation) > 1:
                raise _PolicyChangedError
            with self._wrap_errors_of(environment):
                text = builder.add_generation(generation)
                action = builder.add_action(await settle(environment.parse(text, episode)))
            if on_event is not None:
                acted = RunStreamResponse(sample=sample, text=builder.last_turn_text)
                acted.acted.CopyFrom(builder.turns[-1])
                on_event(acted)
            if not builder.may_act or action.kind == ActionKind.ACTION_KIND_ANSWER:
                continue
            if action.kind == ActionKind.ACTION_KIND_INVALID:
                with self._wrap_errors_of(environment):
                    builder.add_feedback()
            else:
                start = time.perf_counter()
                try:
                    attributes: tracing.Attributes = {"forage.turn": episode.turn, "forage.tag": action.tag}
                    waiting_tokens = len(context) + len(generation.token_ids)
                    with (
                        self._wrap_errors_of(environment),
                        tracing.span("rollout.respond", attributes),
                        searching_for(waiting_tokens),
                    ):
                        builder.add_observation(await environment.respond(action, episode))
                finally:
                    timings.retrieve_s += time.perf_counter() - start
            if on_event is not None and builder.last_observation:
                observed = RunStreamResponse(sample=sample, text=builder.last_observation)
                observed.observed.CopyFrom(builder.turns[-1])
                on_event(observed)

    async def _run_session(
        self, builder: TrajectoryBuilder, timings: Timings, group: _Group, environment: External
    ) -> None:
        """Let a worker's agent write the contexts, from when there is a worker until it ends the session.

        Raises:
            WorkerLostError: the worker fell silent; the sample must begin again.
            EnvironmentFailedError, RefusedError: the agent failed, or has asked for nothing.
        """
        prompt, sample = group.prompt, builder.episode.sample
        values = prompt.template if prompt.HasField("template") else self._template

        async def generate(context: list[int], length: int, stop: tuple[str, ...], number: int) -> Generation:
            affinity, rank = _build_affinity(prompt), self._rank(group, len(context))
            request = build_request(prompt.sampling, context, length, sample, number, stop, 0, affinity, rank)
            start = time.perf_counter()
            try:
                return await self._generate(request, number)
            finally:
                timings.generate_s += time.perf_counter() - start

        async def render(chat: Chat, tools: tuple[dict[str, Any], ...]) -> RenderedPrompt:
            given = values
            if tools:
                variables = json.loads(values.variables or "{}") | {"tools": tools}
                given = TemplateValues(variables=json.dumps(variables), today=values.today)
            return await self._engine.render_chat(chat, given)

        session = self.sessions.open(builder, render, generate, environment.max_requests)
        try:
            why = "until a worker takes them, which may be started at any time"
            with waiting("workers for sessions", on="forage worker", limit_s=None, why_unlimited=why):
                await session.taken.wait()
            with waiting("workers to end their sessions", on="forage worker", limit_s=group.limit_s):
                async with asyncio.timeout(group.limit_s):
                    ending = await session.wait_for_end()
        finally:
            self.sessions.close(session)
        if ending.error:
            self.counts.environment_failures += 1
            raise EnvironmentFailedError(f"the worker's agent failed: {ending.error}")
        if not builder.turns:
            raise RefusedError("the worker ended the session without a request: nothing was sampled")
        builder.add_action(environment.parse(builder.last_generation[1], builder.episode))
        if ending.reward is not None:
            builder.score = Score(status=Status.STATUS_OK, total=ending.reward, reward="worker")

    def _rank(self, group: _Group, context_tokens: int) -> int:
        if group.prompt.purpose == Purpose.PURPOSE_ASK:
            return 0
        return rank_generation(context_tokens, group.ended, group.samples, self._limits.max_context_length)

    async def _generate(self, request: GenerationRequest, turn: int) -> Generation:
        attributes: tracing.Attributes = {"forage.turn": turn, "forage.context_tokens": len(request.token_ids)}
        with tracing.span("rollout.generate", attributes, kind=SpanKind.CLIENT) as span:
            with waiting("generations", on="engine", limit_s=self._timeout_s):
                generation = await self._engine.generate(request)
            span.set_attributes(
                {"forage.tokens": len(generation.token_ids), "forage.hit_length": generation.hit_length}
            )
            if generation.versions:
                span.set_attributes({"forage.policy_version": generation.versions[-1][0]})
            return generation

    @contextmanager
    def _wrap_errors_of(self, environment: AnyEnvironment) -> Iterator[None]:
        """Let errors of services pass; wrap and count any other exception of the environment's own code."""
        try:
            yield
        except (UnavailableError, RefusedError, MalformedReplyError):
            raise
        except Exception as error:
            self.counts.environment_failures += 1
            name = build_name(environment)
            if isinstance(error, EnvironmentFailedError):  # in its own process, which says what and where
                log.error("environment_failed", environment=name, detail=str(error), stack=error.stack)
                raise
            log.exception("environment_failed", environment=name)
            raise EnvironmentFailedError(f"environment {name}: {type(error).__name__}: {error}") from error

    def _complete(self, trajectory: Trajectory, prompt: Prompt, sample: int, timings: Timings) -> Trajectory:
        """Add identity, timings and the name of this replica."""
        whole = with_prompt_identity(trajectory, prompt, sample)
        whole.timings.CopyFrom(timings)
        whole.replica = self._replica
        return whole

    async def _score_trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        """Score the trajectories without a failure in one call; a failing reward fails them all."""
        whole = [t for t in trajectories if t.status == Status.STATUS_OK]
        if not whole:
            return
        items = [build_score_item(trajectory, self._end_of_turn) for trajectory in whole]
        start = time.perf_counter()
        try:
            scored = await self._reward.score(items)
        except (UnavailableError, RefusedError, SettingsError, grpc.RpcError, MalformedReplyError) as error:
            log.warning("scoring_failed", group=whole[0].group_uid, detail=str(error))
            for trajectory in whole:
                trajectory.status, trajectory.status_detail = _find_status(error), str(error)
                trajectory.score.CopyFrom(Score(status=trajectory.status, detail=str(error)))
        else:
            for trajectory, item in zip(whole, scored, strict=True):
                trajectory.validation_score.CopyFrom(item.validation_score)
                if trajectory.HasField("score"):  # a worker's; the service's is for validations alone
                    continue
                trajectory.score.CopyFrom(item.score)
                # An abstention is not a failure: the trainer leaves it out of loss and baseline by its score.
                if item.score.status not in (Status.STATUS_OK, Status.STATUS_ABSTAIN):
                    trajectory.status, trajectory.status_detail = item.score.status, item.score.detail
        for trajectory in whole:
            trajectory.timings.score_s = time.perf_counter() - start

    def _count_trajectory(self, trajectory: Trajectory) -> None:
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


def _build_affinity(prompt: Prompt) -> str:
    return f"{prompt.run_id}/{prompt.group_uid}"


def _count_policies(builder: TrajectoryBuilder, generation: Generation) -> int:
    """Policies that have sampled a trajectory with this generation."""
    before = {(segment.version, segment.epoch) for segment in builder.segments}
    return len(before | {(version, epoch) for version, epoch, _, _ in generation.versions})


def _find_status(error: Exception) -> Status.ValueType:
    """The status of a trajectory whose call of another service failed."""
    if isinstance(error, UnavailableError):
        return Status.STATUS_TIMEOUT
    is_refused = isinstance(error, RefusedError)
    is_refused |= isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.INVALID_ARGUMENT
    return Status.STATUS_INVALID_INPUT if is_refused else Status.STATUS_INTERNAL
